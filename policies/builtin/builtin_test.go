package builtin

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/policies/param"
)

var update = flag.Bool("update", false, "write the tables of parameters into the README.md files")

// folders are the folders of the policies.
var folders = map[string]string{
	"auto": "plan", "always": "plan", "never": "plan", "pd_auto": "pdauto",
	"round_robin": "roundrobin", "least_load": "leastload", "power_of_two": "poweroftwo",
	"conversation": "conversation", "kv_aware": "kvaware", "pair_aware": "pairaware",
	"trtllm_kv_cache_aware": "trtllmkv", "trtllm_conversation": "trtllmconversation",
	"sglang_cache_aware": "sglangcache", "slo_aware": "sloaware", "dynamo_cost": "dynamocost",
	"snowflake": "snowflake", "likely": "likely", "lease": "retain", "none": "retain", "lowest_youngest": "lowestyoungest",
}

func names() []string {
	var names []string
	all := New()
	for _, p := range all.Plans() {
		names = append(names, p.Name)
	}
	for _, p := range all.Places() {
		names = append(names, p.Name)
	}
	for _, p := range all.Mints() {
		names = append(names, p.Name)
	}
	for _, p := range all.Retains() {
		names = append(names, p.Name)
	}
	for _, p := range all.Evicts() {
		names = append(names, p.Name)
	}
	return names
}

// TestREADME: each policy has a README.md, and its table of parameters equals
// that of the code.
func TestREADME(t *testing.T) {
	table := regexp.MustCompile(`(?s)\| name \| default \| unit \| meaning \|\n\|---\|---\|---\|---\|\n(\|[^\n]*\n)*`)
	for _, name := range names() {
		path := "../" + folders[name] + "/README.md"
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want := markdown(New().Table(name))
		if *update && want != "" {
			text = table.ReplaceAllLiteral(text, []byte(want))
			if err := os.WriteFile(path, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := string(table.Find(text)); folders[name] != "plan" && got != want {
			t.Errorf("%s has the parameters\n%swant\n%s", path, got, want)
		}
		if !strings.Contains(string(text), name) {
			t.Errorf("%s does not name %s", path, name)
		}
		if strings.Contains(want, "Limits") || !strings.Contains(string(text), "**Limits.**") || !strings.Contains(string(text), "**Example.**") {
			t.Errorf("%s lacks its limits or an example", path)
		}
	}
}

// markdown returns the table for a README.md; "" without parameters.
func markdown(t param.Table) string {
	if len(t) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("| name | default | unit | meaning |\n|---|---|---|---|\n")
	for _, p := range t {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", p.Key(), param.Format(p.Default), p.Unit, p.Meaning)
	}
	return b.String()
}

// TestTables: names are unique, defaults are within their bounds and equal the policy's
// initial values, and each parameter has a separate field.
func TestTables(t *testing.T) {
	for _, policy := range Configured() {
		all, seen := New(), map[string]bool{}
		fields := map[*float64]bool{}
		for _, p := range all.Table(policy) {
			if p.Labels != nil {
				p.Value = new(float64)
				if len(p.Labels.Names) != 0 || p.Default != 0 {
					t.Errorf("%s: %s has labels", policy, p.Name)
				}
			}
			switch {
			case seen[p.Name], fields[p.Value]:
				t.Errorf("%s: %s occurs twice", policy, p.Name)
			case *p.Value != p.Default, p.Default < p.Least, p.Default > p.Most:
				t.Errorf("%s: %s is %v, default %v of %v to %v", policy, p.Name, *p.Value, p.Default, p.Least, p.Most)
			case p.Meaning == "", strings.Trim(p.Name, "abcdefghijklmnopqrstuvwxyz_") != "":
				t.Errorf("%s: %q means %q", policy, p.Name, p.Meaning)
			}
			seen[p.Name], fields[p.Value] = true, true
		}
	}
	for _, name := range names() {
		has := false
		for _, c := range Configured() {
			has = has || c == name
		}
		if has != (New().Table(name) != nil) {
			t.Errorf("Configured() and Table(%q) disagree", name)
		}
	}
}

func TestConfigure(t *testing.T) {
	p := New()
	if err := p.Configure("kv_aware.patience=7\n\n  conversation.overload_factor=2.5\n"); err != nil {
		t.Fatal(err)
	}
	if p.kvAware.Patience != 7 || p.conversation.OverloadFactor != 2.5 {
		t.Errorf("patience %v, overload factor %v", p.kvAware.Patience, p.conversation.OverloadFactor)
	}
	for text, want := range map[string]string{
		"kv_aware.label_micros=1":  `kv_aware: no parameter "label_micros"; there are`,
		"kv_aware.patience.x=1":    `kv_aware: no parameter "patience.x"`,
		"kv_aware.patience":        "is not policy.parameter=number",
		"patience=1":               "is not policy.parameter=number",
		"kv_aware.patience=many":   "is not policy.parameter=number",
		"kv_aware.patience=NaN":    "kv_aware: patience is 0 to",
		"kv_aware.patience=-1":     "kv_aware: patience is 0 to",
		"kv_aware.patients=1":      `kv_aware: no parameter "patients"`,
		"least_load.patience=1":    `no policy "least_load" has parameters`,
		"pair_aware.patience=1e99": "pair_aware: patience is 0 to",
	} {
		if err := New().Configure(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: New().Configure(text) = %v, want %q", text, err, want)
		}
	}
}
