package enginesim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// golden is an exchange that was recorded from a real vLLM engine.
type golden struct {
	method, path, body string
	id                 string // X-Request-Id of the request
	status             int
	contentType        string
	answer             string
}

func readGolden(t *testing.T, name string) golden {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "conformance", "real", "golden", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	_, exchange, _ := strings.Cut(string(raw), ">>>\n")
	request, response, ok := strings.Cut(exchange, "<<<\n")
	if !ok {
		t.Fatalf("golden %s has no answer", name)
	}
	var g golden
	head, body, _ := strings.Cut(request, "\n\n")
	fmt.Sscanf(head, "%s %s", &g.method, &g.path)
	g.body, g.id = strings.TrimRight(body, "\n"), headerOf(head, "X-Request-Id")
	head, body, _ = strings.Cut(response, "\n\n")
	fmt.Sscanf(head, "HTTP/1.1 %d", &g.status)
	g.contentType, g.answer = headerOf(head, "Content-Type"), strings.TrimRight(body, "\n")
	return g
}

func headerOf(head, name string) string {
	m := regexp.MustCompile(`(?mi)^` + name + `: (.*)$`).FindStringSubmatch(head)
	if m == nil {
		return ""
	}
	return m[1]
}

// shape returns a JSON value with its members in order and with the kinds of
// its scalars. Equal neighbours in a list appear once.
func shape(t *testing.T, raw []byte) string {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(raw))
	var value func() string
	value = func() string {
		tok, err := dec.Token()
		if err != nil {
			t.Fatalf("%v in %s", err, raw)
		}
		switch tok := tok.(type) {
		case json.Delim:
			var items []string
			for dec.More() {
				if tok == '{' {
					key, _ := dec.Token()
					items = append(items, fmt.Sprintf("%q:%s", key, value()))
				} else {
					items = append(items, value())
				}
			}
			dec.Token()
			if tok == '[' {
				return "[" + strings.Join(slices.Compact(items), ",") + "]"
			}
			return "{" + strings.Join(items, ",") + "}"
		case string:
			return "text"
		case float64:
			return "number"
		case nil:
			return "null"
		}
		return fmt.Sprint(tok)
	}
	return value()
}

// future are the keys that the simulator adds to the transfer parameters.
var future = regexp.MustCompile(`,"remote_agent_epoch":\d+,"remote_agent_tag":"(?:\\.|[^"\\])*","remote_regions":\[[^]]*\]`)

// shapes returns the shape of an answer. For a stream it returns the name and
// shape of each event; consecutive events of one shape appear once.
func shapes(t *testing.T, contentType, body string) []string {
	t.Helper()
	body = future.ReplaceAllString(body, "")
	if !strings.HasPrefix(contentType, "text/event-stream") {
		return []string{shape(t, []byte(body))}
	}
	var list []string
	for event := range strings.SplitSeq(strings.TrimRight(body, "\n"), "\n\n") {
		name, data, ok := strings.Cut(event, "data: ")
		if !ok {
			t.Fatalf("event %q", event)
		}
		if data != "[DONE]" {
			data = shape(t, []byte(data))
		}
		list = append(list, name+data)
	}
	return slices.Compact(list)
}

// TestLikeRealEngine sends the requests that were recorded with real engines
// and compares the statuses, types and shapes of the answers.
func TestLikeRealEngine(t *testing.T) {
	pd := startPair(t, ConnectorVLLMNixl, func(c *Config) { c.Model, c.BlockSize, c.KVBlocks = "tiny", 32, 128 })
	compare := func(t *testing.T, g golden, a answer) {
		t.Helper()
		if a.status != g.status || a.header.Get("Content-Type") != g.contentType {
			t.Fatalf("%d %s, real %d %s: %s", a.status, a.header.Get("Content-Type"), g.status, g.contentType, a.body)
		}
		got, want := shapes(t, g.contentType, string(a.body)), shapes(t, g.contentType, g.answer)
		if !slices.Equal(got, want) {
			t.Errorf("answer\n%s\nreal\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	send := func(e *Engine, g golden, body string) answer {
		return post(t, e.URL()+g.path, body, "X-Request-Id", g.id)
	}
	ids := regexp.MustCompile(`"(?:id|remote_request_id)":"([^"]*)"`)
	params := regexp.MustCompile(`"kv_transfer_params": ?\{[^}]*\}`)
	idLists := regexp.MustCompile(`"(prompt_token_ids|tokens)": \[[^]]*\]`)
	for _, name := range []string{
		"chat_unary", "chat_stream", "completions_unary", "completions_stream", "responses_unary", "responses_stream", "messages_unary", "messages_stream",
	} {
		t.Run(name, func(t *testing.T) {
			prefill, decode := readGolden(t, name+"_prefill"), readGolden(t, name+"_decode")
			p := send(pd.p, prefill, prefill.body)
			compare(t, prefill, p)
			hex := regexp.MustCompile(`[0-9a-f]{16}|-[0-9a-f]{8}$`)
			for i, m := range ids.FindAllStringSubmatch(prefill.answer, -1) {
				if got := ids.FindAllStringSubmatch(string(p.body), -1)[i][1]; hex.ReplaceAllString(got, "#") != hex.ReplaceAllString(m[1], "#") {
					t.Errorf("id %s, real %s", got, m[1])
				}
			}
			body := params.ReplaceAllLiteralString(decode.body, `"kv_transfer_params":`+p.params(t))
			compare(t, decode, send(pd.d, decode, body))
		})
	}
	if s := pd.d.State(); s.Transfers != 8 || s.Errors != 0 {
		t.Errorf("decode %+v", s)
	}
	for _, name := range []string{"completions_short_prefill", "completions_stream_on_prefill", "completions_no_params_decode", "refuse_n_2", "refuse_prompt_list_2"} {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			a := send(pd.p, g, g.body)
			compare(t, g, a)
			if name == "refuse_n_2" && !strings.Contains(string(a.body), `"remote_request_id":"1_cmpl-`) {
				t.Errorf("not the last sample's parameters: %s", a.body)
			}
		})
	}
	for _, name := range []string{"completions_ids_alone", "completions_ids_again_alone", "chat_ids_alone", "chat_ids_again_alone", "detokenize_alone"} {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			body := idLists.ReplaceAllString(g.body, `"$1": [1523,1016]`) // the simulator's vocabulary is another one
			compare(t, g, send(pd.p, g, body))
		})
	}
	for _, name := range []string{"models", "load", "version"} {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			resp, err := http.Get(pd.p.URL() + g.path)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var b bytes.Buffer
			b.ReadFrom(resp.Body)
			compare(t, g, answer{resp.StatusCode, b.Bytes(), resp.Header})
		})
	}
	pd.p.Ranks[0].UnpinAll() // the recorded requests leave pinned sets without a reader
}

// TestRefusalsLikeRealEngine: rejections are equal byte for byte.
func TestRefusalsLikeRealEngine(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RolePrefill, Model: "tiny", BlockSize: 32, KVBlocks: 128})
	files, err := filepath.Glob(filepath.Join("..", "..", "conformance", "real", "golden", "refuse_*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	other := []string{
		"refuse_n_2", "refuse_prompt_list_2", // served
		"refuse_generate_disabled",                  // the simulator has the route
		"refuse_huge_prompt", "refuse_exact_prompt", // other tokens: see below
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		if slices.Contains(other, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			req, _ := http.NewRequest(g.method, e.URL()+g.path, strings.NewReader(g.body))
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var b bytes.Buffer
			b.ReadFrom(resp.Body)
			if resp.StatusCode != g.status || b.String() != g.answer || resp.Header.Get("Content-Type") != g.contentType {
				t.Errorf("%d %s, real %d %s", resp.StatusCode, b.String(), g.status, g.answer)
			}
		})
	}
	for name, tokens := range map[string]int{"refuse_huge_prompt": 4097, "refuse_exact_prompt": 4096} {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			a := post(t, e.URL()+g.path, fmt.Sprintf(`{"prompt":%s,"max_tokens":1}`, strings.ReplaceAll(fmt.Sprint(slices.Repeat([]int{7}, tokens)), " ", ",")))
			if a.status != g.status || string(a.body) != g.answer {
				t.Errorf("%d %s, real %d %s", a.status, a.body, g.status, g.answer)
			}
		})
	}
	if s := e.State(); s.Requests != 0 || s.BlocksPinned != 0 {
		t.Errorf("state %+v", s)
	}
}
