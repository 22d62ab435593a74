package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// pickerConfig is the configuration of an endpoint picker at that address, with the engines of c.
func pickerConfig(c *config.Config, address string) config.Config {
	picker := *c
	picker.Engines = append([]config.Engine(nil), c.Engines...)
	picker.Sidecar = config.Default().Sidecar
	picker.EPP.Listen, picker.EPP.Fallbacks = address, 1
	return picker
}

// underPicker starts a fleet under another pdproxy, its endpoint picker, which knows the same
// engines.
func underPicker(t *testing.T, connector string, o fleetOptions) (*fleet, *process) {
	t.Helper()
	address := testbed.FreeAddr(t)
	var picker config.Config
	o.config = func(c *config.Config) {
		picker = pickerConfig(c, address)
		c.Sidecar.Picker, c.Sidecar.PickerTimeout = "ext_proc://"+address, config.Duration(time.Minute)
		c.Sidecar.PickerSubset, c.Sidecar.PickerFailureModeAllow = true, true
		c.Fleet.NodeID, picker.Fleet.NodeID = 1, 2
		for _, one := range []*config.Config{c, &picker} {
			if problems := one.Validate(); len(problems) > 0 {
				t.Fatal(problems)
			}
		}
	}
	f := startFleet(t, connector, o)
	p := startProcess(t, &picker, nil, node.Options{}) // after the fleet, and so ends before it
	t.Cleanup(func() {
		if err := p.end(); err != nil {
			t.Errorf("the picker's drain was not clean: %v", err)
		}
		p.admin.Client.CloseIdleConnections()
	})
	f.eventually("the picker knows the engines", func() bool {
		for _, state := range p.engines() {
			if state != "ready" {
				return false
			}
		}
		return p.healthy()
	})
	return f, p
}

// TestUnderPicker: a proxy carries out the decisions of another proxy, its endpoint picker. Both
// legs run on the engines that the picker has placed, and the picker sees the usage of the answer.
// Without the picker, the proxy decides itself.
func TestUnderPicker(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang, trtllmFirst} {
		t.Run(connector, func(t *testing.T) {
			f, p := underPicker(t, connector, fleetOptions{})
			for n := range 4 {
				stream, id := n%2 == 1, fmt.Sprintf("picked-%d", n)
				body := chat(fmt.Sprint("picked ", n, long), 12, stream)
				a := f.tell(body, "X-Request-Id", id)
				f.right(a, chatPath, body)
				own, of := explainedBy(f, f.front, id), explainedBy(f, p, id)
				if own.Coordination != "picker" || own.Picker == nil || own.Picker.Result != "picked" || len(own.Picker.Destinations) != 2 {
					t.Errorf("placed by %q, picker %+v", own.Coordination, own.Picker)
				}
				prefill, decode := f.legsOf(own)
				if own.Picker.Destinations[0] != decode || len(own.Picker.Prefill) != 1 || own.Picker.Prefill[0] != prefill {
					t.Errorf("the legs ran on %s and %s, the picker had chosen %+v", prefill, decode, own.Picker)
				}
				if _, chosen := f.legsOf(of); chosen != decode {
					t.Errorf("the picker has placed the request on %s, decode ran on %s", chosen, decode)
				}
				if of.Outcome != "ok" {
					t.Errorf("the picker saw the outcome %q", of.Outcome)
				}
			}
			f.eventually("the picker has no open lease", func() bool {
				open, err := p.admin.Metric("pdproxy_leases_open")
				return err == nil && open == 0
			})
			if err := p.end(); err != nil {
				t.Errorf("the picker's drain: %v", err)
			}
			body := chat("without a picker "+long, 12, true)
			f.right(f.tell(body), chatPath, body)
			if n := f.metric("pdproxy_picker_requests_total", `result="unavailable"`); n != 1 {
				t.Errorf("%v requests without a picker", n)
			}
		})
	}
}

// explainedBy returns the explanation of a request by a process.
func explainedBy(f *fleet, p *process, id string) (e journal.Explanation) {
	f.t.Helper()
	f.eventually("the request is explained", func() bool {
		e = journal.Explanation{}
		return p.admin.Get("/v1/explain/"+id, &e) == nil && e.RequestID == id
	})
	return e
}

// legsOf returns the addresses of the engines of both legs.
func (f *fleet) legsOf(e journal.Explanation) (prefill, decode string) {
	for _, l := range e.Legs {
		for _, spec := range f.cfg.Engines {
			switch {
			case spec.Name != l.Engine:
			case l.Phase == "prefill":
				prefill = spec.Address()
			default:
				decode = spec.Address()
			}
		}
	}
	return prefill, decode
}
