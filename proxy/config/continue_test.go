package config

import "testing"

func TestContinues(t *testing.T) {
	c := Default()
	if got := c.Continues("m"); got != ContinueOn {
		t.Errorf("the default is %q", got)
	}
	c.Models = []Model{
		{Name: "off", Continue: ContinueOff}, {Name: "alias", AliasOf: "off"}, {Name: "drain", AliasOf: "off", Continue: ContinueDrain},
		{Name: "a", AliasOf: "b"}, {Name: "b", AliasOf: "a"}, // the configuration does not allow such a cycle
	}
	for name, want := range map[string]string{"m": ContinueOn, "": ContinueOn, "off": ContinueOff, "alias": ContinueOff, "drain": ContinueDrain, "a": ContinueOn} {
		if got := c.Continues(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
