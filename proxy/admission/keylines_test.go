package admission

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestListKeys(t *testing.T) {
	text := "# teams\n" + strings.TrimSpace(lineOf("a", "1")) + " tpm=5\n\n" + strings.TrimSpace(lineOf("b", "2")) + " tenant=a\n" +
		strings.TrimSpace(lineOf("c", "3")) + " class=high models=x,y rpm=60 tpm=1000 max=4"
	list, err := ListKeys([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	want := []KeyLine{{Line: 2, Name: "a", Tokens: 5}, {Line: 4, Name: "b", Tenant: "a"}, {Line: 5, Name: "c", Class: "high", Requests: 60, Tokens: 1000, Max: 4}}
	if len(list) != len(want) || strings.Join(list[2].Models, " ") != "x y" {
		t.Fatalf("%+v", list)
	}
	for i, k := range list {
		k.Models = nil
		if k.Line != want[i].Line || k.Name != want[i].Name || k.Tenant != want[i].Tenant || k.Class != want[i].Class ||
			k.Requests != want[i].Requests || k.Tokens != want[i].Tokens || k.Max != want[i].Max {
			t.Errorf("%+v, want %+v", k, want[i])
		}
	}
	if _, err := ListKeys([]byte("sk-plain\n")); err == nil {
		t.Error("a wrong file has a list")
	}
}

func TestRemoveKey(t *testing.T) {
	gold := []config.Tenant{{Name: "gold"}}
	a, b, c := lineOf("a", "1"), strings.TrimSpace(lineOf("b", "2"))+" tenant=a\r\n", strings.TrimSpace(lineOf("c", "3"))+" tenant=gold"
	for name, tt := range map[string]struct {
		text    string
		number  int
		tenants []config.Tenant
		want    string
		err     string
	}{
		"first":          {a + c, 1, gold, c, ""},
		"bytes stay":     {"# é\r\n\n" + a + "  # last one  \n" + c, 5, gold, "# é\r\n\n" + a + "  # last one  \n", ""},
		"only key":       {"# x\n" + a, 2, nil, "", "it is the only key"},
		"used as tenant": {strings.TrimSpace(a) + " rpm=1\n" + b, 1, nil, "", "the file would be wrong without the line: line 1"},
	} {
		got, err := RemoveKey([]byte(tt.text), tt.number, tt.tenants...)
		if string(got) != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestAddKey(t *testing.T) {
	a, b := lineOf("a", "1"), strings.TrimSpace(lineOf("b", "2"))
	for text, want := range map[string]string{
		"":                   b + "\n",
		a:                    a + b + "\n",
		strings.TrimSpace(a): a + b + "\n",
		"# none yet\r\n":     "# none yet\r\n" + b + "\n",
	} {
		if got, err := AddKey([]byte(text), b); err != nil || string(got) != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	if _, err := AddKey([]byte(a), b+" tenant=nobody"); err == nil {
		t.Error("a line with an unknown tenant is added")
	}
}
