package connector

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestPriority: the priority of an attempt is in the body of each leg of all golden cases,
// in place of the client's. It changes nothing else.
func TestPriority(t *testing.T) {
	legs := 0
	for _, c := range All() {
		files, err := filepath.Glob(filepath.Join("testdata", c.Name(), "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			g := readGolden(t, file)
			a := g.attempt(t, c)
			if a.Request.Form {
				continue
			}
			for phase, build := range g.legs(c) {
				a.Priority = nil
				plain, err := build(a)
				if err != nil {
					continue // the golden test has the reason
				}
				want := membersOf(t, plain.Body)
				want["priority"] = json.RawMessage("-7")
				a.Priority = []byte("-7")
				leg, err := build(a)
				if err != nil {
					t.Fatalf("%s, %s leg: %v", file, phase, err)
				}
				if got := membersOf(t, leg.Body); !reflect.DeepEqual(got, want) && len(leg.Header) == len(plain.Header) {
					t.Errorf("%s, %s leg: got %s", file, phase, leg.Body)
				}
				if string(membersOf(t, leg.Body)["priority"]) != "-7" {
					t.Errorf("%s, %s leg: no priority in %s", file, phase, leg.Body)
				}
				legs++
			}
		}
	}
	if legs < 100 {
		t.Errorf("only %d legs were compared", legs)
	}
}

// legs returns functions that build the legs of a case.
func (g *golden) legs(c Connector) map[string]func(*Attempt) (Leg, error) {
	legs := map[string]func(*Attempt) (Leg, error){}
	if g.Aggregated != nil {
		legs["aggregated"] = func(a *Attempt) (Leg, error) { return c.Aggregated(a, nil) }
	}
	if g.PrefillLeg != nil {
		legs["prefill"] = func(a *Attempt) (Leg, error) { return c.Prefill(a, nil) }
	}
	if g.DecodeLeg != nil {
		legs["decode"] = func(a *Attempt) (Leg, error) {
			if g.PrefillAnswer == nil {
				return c.Decode(a, nil, nil)
			}
			h, err := c.ReadPrefill(a, []byte(*g.PrefillAnswer))
			if err != nil || h.Done {
				return Leg{}, errNoHandoff
			}
			return c.Decode(a, &h, nil)
		}
	}
	return legs
}

// membersOf returns the members of a JSON object, each once.
func membersOf(t *testing.T, body []byte) map[string]json.RawMessage {
	t.Helper()
	var o openai.Object
	if err := o.Parse(body); err != nil { // rejects a key that occurs twice
		t.Fatalf("%v in %s", err, body)
	}
	m := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &m); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return m
}
