package openai

import (
	"fmt"
	"strings"
	"testing"
)

// adaptersOf lists what EachAdapter visits.
func adaptersOf(r *Request) (list []string) {
	r.EachAdapter(func(a Adapter) bool {
		list = append(list, fmt.Sprintf("%s=%s %t", a.Field, a.Name, a.Exact))
		return true
	})
	return list
}

// Fields that select adapters are found in every API, in all their forms.
func TestAdapters(t *testing.T) {
	const long = MaxModel + 1
	for members, want := range map[string]string{
		``:                                         "",
		`,"lora_path":null`:                        "",
		`,"lora_path":""`:                          "",
		`,"lora_path":"a"`:                         "lora_path=a true",
		`,"\u006cora_path":"\u0061"`:               "lora_path=a true",
		`,"Lora_Path":"a"`:                         "Lora_Path=a true",
		`,"lora_path":["a",null,"","b"]`:           "lora_path=a true|lora_path=b true",
		`,"lora_path":[["a"]]`:                     "lora_path= false",
		`,"lora_path":5`:                           "lora_path= false",
		`,"lora_id":"u"`:                           "lora_id=u true",
		`,"lora_request":{"lora_name":"a"}`:        "lora_request=a false",
		`,"lora_request":{"lora_int_id":1}`:        "lora_request= false",
		`,"lora_request":[{"lora_name":"a"}]`:      "lora_request= false",
		`,"lora_path":"a","adapter_id":"b"`:        "lora_path=a true|adapter_id=b true",
		`,"explore":"a","flora":"b","metadata":{}`: "",
	} {
		for api := Completions; api <= EngineRoute; api++ {
			var r Request
			body := `{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}]` + members + `}`
			if api == Embeddings || api == Tokenize || api == Completions {
				body = strings.Replace(body, `,"messages":[{"role":"user","content":"x"}]`, "", 1)
			}
			if err := ParseRequest(api, []byte(body), &r); err != nil {
				t.Fatalf("%v: %s: %v", api, body, err)
			}
			if got := strings.Join(adaptersOf(&r), "|"); got != want {
				t.Errorf("%v: %s: got %q, want %q", api, members, got, want)
			}
		}
	}
	part := func(name, value string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	form := part("lora_path", "a") + part("lora_request[lora_name]", "b") + part("LORA_ID", strings.Repeat("x", long)) + part("other", "c") + "--b--"
	var r Request
	if err := ReadRequest(Transcriptions, "multipart/form-data; boundary=b", []byte(form), &r); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(adaptersOf(&r), "|"); got != "lora_path=a true|lora_request[lora_name]= false|LORA_ID= false" {
		t.Errorf("a form: %q", got)
	}
	if err := ReadRequest(EngineRoute, "", []byte(`{"lora_path":"a"}`), &r); err != nil {
		t.Fatal(err)
	}
	if err := r.ReadTarget("/x", "lora_path=b&lora_request[lora_name]=c&b=d"); err != nil {
		t.Fatal(err)
	}
	list := adaptersOf(&r)
	if len(list) != 3 || list[2] != "lora_path=a true" || !strings.Contains(strings.Join(list, "|"), "lora_path=b true") {
		t.Errorf("a query: %q", list)
	}
	if r.Reset(); adaptersOf(&r) != nil {
		t.Error("Reset keeps adapters")
	}
}

// Fields that change an engine are found in members, parts of forms and queries.
func TestEngineFields(t *testing.T) {
	for members, want := range map[string]string{
		`"custom_logit_processor":"x"`:                  "custom_logit_processor",
		`"custom_logit_processor":null`:                 "",
		`"custom_logit_processor":[null,"x"]`:           "custom_logit_processor",
		`"Session_Params":{"id":"a"}`:                   "session_params",
		`"\u0073ession_params":{}`:                      "session_params",
		`"logits_processors":["os.system"]`:             "logits_processors",
		`"sampling_params":{"logits_processors":["a"]}`: "sampling_params.logits_processors",
		`"session_id":"a","vllm_xargs":{}`:              "",
	} {
		var r Request
		if err := ParseRequest(VLLMGenerate, []byte("{"+members+"}"), &r); err != nil {
			t.Fatalf("%s: %v", members, err)
		}
		if r.EngineField != want {
			t.Errorf("%s: got %q, want %q", members, r.EngineField, want)
		}
	}
	var r Request
	body := "--b\r\nContent-Disposition: form-data; name=\"session_params\"\r\n\r\n{}\r\n--b--"
	if err := ReadRequest(ImageEdits, "multipart/form-data; boundary=b", []byte(body), &r); err != nil || r.EngineField != "session_params" {
		t.Errorf("a form: %q, %v", r.EngineField, err)
	}
	if err := ReadRequest(EngineRoute, "", []byte(`{}`), &r); err != nil || r.EngineField != "" {
		t.Fatalf("%q, %v", r.EngineField, err)
	}
	if err := r.ReadTarget("/x", "custom_logit_processor=x"); err != nil || r.EngineField != "custom_logit_processor" {
		t.Errorf("a query: %q, %v", r.EngineField, err)
	}
}
