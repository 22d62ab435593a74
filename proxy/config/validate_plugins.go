package config

import (
	"cmp"
	"encoding/hex"
	"slices"
	"strings"
	"unicode"

	"aead.dev/minisign"
	"oras.land/oras-go/v2/registry"
)

// plugins checks every [[plugin]].
func (k *checker) plugins() {
	names := map[string]string{}
	for i, p := range k.config.Plugins {
		key := func(name string) string { return joinKey(indexKey("plugin", i), name) }
		k.name(key("name"), p.Name)
		k.unique(key("name"), p.Name, names)
		k.required(key("path"), p.Path)
		if name, ok := p.Builtin(); ok {
			k.builtinFilter(key, name, p)
		} else if p.InRegistry() {
			k.artifact(key("path"), p.Path)
		} else if p.Remote() {
			k.httpURL(key("path"), p.Path)
		}
		k.signature(key, p)
		if digest, err := hex.DecodeString(p.SHA256); p.SHA256 != "" && (err != nil || len(digest) != 32) {
			k.add(key("sha256"), "must be 64 hex digits, or empty")
		}
		k.oneOf(key("phase"), p.Phase, PhasePolicy, PhaseFilter)
		k.oneOf(key("fail"), p.Fail, "", "closed", "open")
		if p.Phase == PhasePolicy && p.Fail != "" {
			k.add(key("fail"), "is for filters only: a policy that fails falls back to the built-in rule")
		}
		k.oneOf(key("header_stop"), p.HeaderStop, "all", "headers")
		k.allowed(i, p)
		k.memory(key("memory"), p.Memory)
		if p.HostMemory < 64<<10 {
			k.add(key("host_memory"), "must be at least 64KiB, found %v", p.HostMemory)
		}
		k.share(key("canary"), p.Canary)
		if p.Phase == PhaseFilter && p.Canary != 0 {
			k.add(key("canary"), "is for policies only")
		}
		k.atLeast(key("crash_budget"), p.CrashBudget, 0)
		k.positive(key("crash_window"), int64(p.CrashWindow))
	}
}

// builtinFilter requires the name of a built-in filter, whose module comes with the program.
func (k *checker) builtinFilter(key func(string) string, name string, p Plugin) {
	if !slices.Contains(builtinFilters(), name) {
		k.add(key("path"), "no built-in filter is named %q%s the built-in ones are %s", name, cmp.Or(DidYouMean(name, builtinFilters()), ";"), quoteAll(builtinFilters()))
		return
	}
	if p.Phase == PhasePolicy {
		k.add(key("phase"), "must be \"filter\": %q is a filter", name)
	}
	if p.SHA256 != "" {
		k.add(key("sha256"), "must be empty: a built-in module comes with the program")
	}
	if p.PublicKey != "" {
		k.add(key("public_key"), "must be empty: a built-in module comes with the program")
	}
}

// artifact requires oci://REGISTRY/REPOSITORY with a tag or a digest.
func (k *checker) artifact(key, path string) {
	ref, err := registry.ParseReference(strings.TrimPrefix(path, "oci://"))
	if err != nil || ref.Reference == "" {
		k.add(key, "must be oci://REGISTRY/REPOSITORY:TAG or oci://REGISTRY/REPOSITORY@sha256:DIGEST, found %q", path)
	}
}

// signature checks the keys of a module's signature.
func (k *checker) signature(key func(string) string, p Plugin) {
	var parsed minisign.PublicKey
	if p.PublicKey != "" && parsed.UnmarshalText([]byte(p.PublicKey)) != nil {
		k.add(key("public_key"), "is not a public key of minisign: want the second line of its .pub file")
	}
	switch {
	case p.Signature != "" && p.PublicKey == "":
		k.add(key("signature"), "needs public_key")
	case strings.HasPrefix(p.Signature, "oci://"):
		k.add(key("signature"), "must be a path or an http or https URL; the signature of an artifact is a part of the artifact")
	case strings.HasPrefix(p.Signature, "http://"), strings.HasPrefix(p.Signature, "https://"):
		k.httpURL(key("signature"), p.Signature)
	}
}

// memory requires a size that a 32-bit Wasm memory can have: one page to 4GiB.
func (k *checker) memory(key string, size ByteSize) {
	if size < 64<<10 || size > 4<<30 {
		k.add(key, "must be from 64KiB to 4GiB, found %v", size)
	}
}

// allowed checks the allow-lists of p, plugin i.
func (k *checker) allowed(i int, p Plugin) {
	known := map[string]bool{"*": true}
	for _, u := range k.config.Upstreams {
		known[u.Name] = true
	}
	for n, name := range p.Upstreams {
		if !known[name] {
			k.add(indexKey(joinKey(indexKey("plugin", i), "upstreams"), n), "no [[upstream]] is named %q", name)
		}
	}
	for n, name := range p.HostFunctions {
		k.required(indexKey(joinKey(indexKey("plugin", i), "host_functions"), n), name)
	}
}

// upstreams checks every [[upstream]].
func (k *checker) upstreams() {
	names := map[string]string{}
	for i, u := range k.config.Upstreams {
		key := joinKey(indexKey("upstream", i), "name")
		k.required(key, u.Name)
		if strings.ContainsFunc(u.Name, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }) || u.Name == "*" {
			k.add(key, "invalid name %q: want printable text without spaces, and not *", u.Name)
		}
		k.unique(key, u.Name, names)
		k.httpURL(joinKey(indexKey("upstream", i), "url"), u.URL)
	}
}
