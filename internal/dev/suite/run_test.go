package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestGroups(t *testing.T) {
	for args, want := range map[string][]group{
		"":                         {{}},
		"-race ./a b":              {{flags: []string{"-race"}, packages: []string{"./a", "b"}}},
		"-split=3 -run=X ./a":      {{split: 3, flags: []string{"-run=X"}, packages: []string{"./a"}}},
		"-split=none ./a":          {{split: 1, packages: []string{"./a"}}},
		"./a -- -race ./b -- -p=1": {{packages: []string{"./a"}}, {flags: []string{"-race"}, packages: []string{"./b"}}, {flags: []string{"-p=1"}}},
	} {
		if got := groups(strings.Fields(args)); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: groups(strings.Fields(args)) = %+v, want %+v", args, got, want)
		}
	}
}

// others selects the tests of this package that do not run the suite themselves.
const others = "-skip=^Test(Shards|Trouble)"

// TestShards: the shares of a package contain each selected test once.
func TestShards(t *testing.T) {
	var out strings.Builder
	ok, err := suite(&out, []string{"-strict", "-split=2", "-vet=off", "-timeout=5m", others, "."})
	if !ok || err != nil {
		t.Fatalf("%v, %v:\n%s", ok, err, out.String())
	}
	for _, want := range []string{"suite TestReport\n", "suite TestSlowest\n", "suite TestGroups\n", "\n3 tests, 0 skipped"} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("%q does not occur exactly once:\n%s", want, out.String())
		}
	}
}

// TestTrouble: a problem that prevents tests from running is a failure.
func TestTrouble(t *testing.T) {
	for name, args := range map[string][]string{
		"unknown package":           {"./nowhere"},
		"no test":                   {"-run=^TestNothing$", "."},
		"unknown flag":              {"-nonsense", "."},
		"no package":                {"-run=X"},
		"a group without a package": {others, ".", "--"},
		"split: no test":            {"-split=1", "-run=^TestNothing$", "."},
		"split: unknown package":    {"-split=1", "./nowhere"},
		"split: two packages":       {"-split=1", ".", "../load"},
		"split: bad pattern":        {"-split=1", "-run=(", "."},
		"split: unknown flag":       {"-split=1", "-nonsense", others, "."},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			if ok, err := suite(&out, args); ok {
				t.Errorf("the run is good, %v:\n%s", err, out.String())
			}
		})
	}
}
