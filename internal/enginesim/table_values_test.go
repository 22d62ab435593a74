package enginesim

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// config reads a connector, a role and fields of Config: KVBlocks=4 Nixl.Wire=2.
func (r *runner) config(words []string) Config {
	r.t.Helper()
	cfg := Config{Connector: words[0], Role: words[1], FutureParams: true}
	for _, word := range words[2:] {
		path, text, _ := strings.Cut(word, "=")
		v := reflect.ValueOf(&cfg).Elem()
		for name := range strings.SplitSeq(path, ".") {
			if v = v.FieldByName(name); !v.IsValid() {
				r.fatalf("Config has no %s", path)
			}
		}
		switch v.Interface().(type) {
		case string:
			v.SetString(text)
		case bool:
			v.SetBool(text == "true")
		case []string:
			v.Set(reflect.ValueOf(strings.Split(text, ",")))
		case time.Duration:
			d, err := time.ParseDuration(text)
			if err != nil {
				r.fatalf("%v", err)
			}
			v.SetInt(int64(d))
		default:
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				r.fatalf("%v", err)
			}
			if v.CanUint() {
				v.SetUint(uint64(n))
			} else {
				v.SetInt(n)
			}
		}
	}
	return cfg
}

// compare checks fields of an engine's state: BlocksUsed=0 CachedTokens>5. It returns
// the fields that differ.
func (r *runner) compare(name, conditions string) string {
	r.t.Helper()
	e := r.engine(name)
	for condition := range strings.FieldsSeq(r.expand(conditions)) {
		i := strings.IndexAny(condition, "=<>")
		if i < 0 {
			r.fatalf("condition %q", condition)
		}
		want, err := strconv.ParseInt(condition[i+1:], 10, 64)
		if err != nil {
			r.fatalf("%v", err)
		}
		got := r.figure(e, condition[:i])
		if op := condition[i]; op == '=' && got != want || op == '>' && got <= want || op == '<' && got >= want {
			return fmt.Sprintf("%s is %d; %+v", condition[:i], got, e.State())
		}
	}
	return ""
}

// figure returns a field of State, or a count that only the engine's protocol has.
func (r *runner) figure(e *Engine, name string) int64 {
	r.t.Helper()
	switch name {
	case "ExternalTokens":
		return e.Stats.ExternalTokens.Load()
	case "EventLog":
		if e.Ranks[0].Cache.Log == nil {
			return 0
		}
		return 1
	case "PinnedSets":
		return int64(len(e.Ranks[0].Cache.Pins))
	case "CachedBlocks", "CachedBlocks0", "CachedBlocks1", "CachedBlocks2", "CachedBlocks3":
		rank := e.Ranks[0]
		if i := name[len(name)-1]; i <= '9' {
			rank = e.Ranks[i-'0']
		}
		rank.Mu.Lock()
		defer rank.Mu.Unlock()
		return int64(len(rank.Cache.ByHash))
	case "CachedRanks":
		n := int64(0)
		for i := range e.Ranks {
			n += min(1, r.figure(e, fmt.Sprint("CachedBlocks", i)))
		}
		return n
	case "Registered":
		m := e.Proto.(*vllm.VLLM).Push
		m.Mu.Lock()
		defer m.Mu.Unlock()
		return int64(len(m.Registered))
	case "Bootstrap":
		return e.Proto.(*sglang.SGLang).Queues[0].Bootstrap.Load()
	case "Prealloc":
		return e.Proto.(*sglang.SGLang).Queues[0].Prealloc.Load()
	case "Rooms", "Prefills":
		g := e.Proto.(*sglang.SGLang)
		g.Mu.Lock()
		defer g.Mu.Unlock()
		if name == "Rooms" {
			return int64(len(g.Rooms))
		}
		return int64(len(g.Prefills))
	}
	v := reflect.ValueOf(e.State()).FieldByName(name)
	if !v.IsValid() {
		r.fatalf("an engine has no %s", name)
	}
	return v.Int()
}

var (
	variable     = regexp.MustCompile(`\$\{([A-Za-z]\w*)((?:\.\w+)*)\}|\$([A-Za-z]\w*)((?:\.\w+)*)`)
	wordsCall    = regexp.MustCompile(`@(words|ids)\((\d+),(\d+)\)`)
	signature    = regexp.MustCompile(`@hmac\((\S+?),(.*?)\)`)
	decoded      = regexp.MustCompile(`@float\((.*)\)`)
	promptAt     = regexp.MustCompile(`^\(([^)]*)\) ?(.*)$`)
	substitution = regexp.MustCompile(` \| s(.)`)
)

// define replaces names of definitions.
func (r *runner) define(text string) string {
	for range 5 { // definitions use definitions
		text = variable.ReplaceAllStringFunc(text, func(use string) string {
			name, path := variableIn(use)
			if def, ok := r.defs[name]; ok {
				return def + path
			}
			return use
		})
	}
	return text
}

// variableIn splits the use of a variable: $NAME.PATH or ${NAME.PATH}.
func variableIn(use string) (name, path string) {
	m := variable.FindStringSubmatch(use)
	return m[1] + m[3], m[2] + m[4]
}

// expand replaces variables and functions, and applies substitutions.
func (r *runner) expand(text string) string {
	r.t.Helper()
	text = variable.ReplaceAllStringFunc(r.define(text), func(use string) string {
		name, path := variableIn(use)
		if e := r.engines[name]; e != nil && path != "" {
			return r.engineField(e, path[1:])
		}
		if x := r.answers[name]; x != nil && path != "" {
			return r.member(r.wait(name), strings.Split(path[1:], "."))
		}
		r.fatalf("there is no variable %s", use)
		return use
	})
	if m := promptAt.FindStringSubmatch(text); m != nil {
		prompt := m[1]
		if from, n, ok := strings.Cut(prompt, ","); ok && regexp.MustCompile(`^\d+,\d+$`).MatchString(prompt) {
			prompt = words(number(from), number(n))
		}
		body, parts, _ := strings.Cut(m[2], " | s")
		if text = completion(prompt, body); parts != "" {
			text += " | s" + parts
		}
	}
	return r.substitute(r.call(text))
}

// call replaces the functions in a text.
func (r *runner) call(text string) string {
	r.t.Helper()
	text = wordsCall.ReplaceAllStringFunc(text, func(call string) string {
		m := wordsCall.FindStringSubmatch(call)
		prompt := words(number(m[2]), number(m[3]))
		if m[1] == "words" {
			return prompt
		}
		list, _ := json.Marshal(core.Tokenize(prompt))
		return string(list)
	})
	text = signature.ReplaceAllStringFunc(text, func(call string) string {
		m := signature.FindStringSubmatch(call)
		mac := hmac.New(sha256.New, []byte(m[1]))
		mac.Write([]byte(m[2]))
		return hex.EncodeToString(mac.Sum(nil))
	})
	return decoded.ReplaceAllStringFunc(text, func(call string) string {
		var v any
		if err := json.Unmarshal([]byte(decoded.FindStringSubmatch(call)[1]), &v); err != nil {
			r.fatalf("%v", err)
		}
		raw, _ := json.Marshal(v)
		return string(raw)
	})
}

// substitute applies each " | s/REGEXP/TEXT/" to the text before it. It must change the text.
func (r *runner) substitute(text string) string {
	r.t.Helper()
	for {
		at := substitution.FindStringSubmatchIndex(text)
		if at == nil {
			return text
		}
		delimiter := text[at[2]:at[3]]
		parts := strings.SplitN(text[at[3]:], delimiter, 3)
		if len(parts) != 3 {
			r.fatalf("substitution %q", text[at[0]:])
		}
		changed := regexp.MustCompile(parts[0]).ReplaceAllString(text[:at[0]], parts[1])
		if changed == text[:at[0]] {
			r.errorf("%q is not in %s", parts[0], changed)
		}
		text = changed + parts[2]
	}
}

func number(text string) int {
	n, _ := strconv.Atoi(text)
	return n
}

// engineField returns an address or an id of an engine.
func (r *runner) engineField(e *Engine, name string) string {
	r.t.Helper()
	switch name {
	case "port":
		return strconv.Itoa(e.BootstrapPort())
	case "http":
		_, port, _ := strings.Cut(e.Addr(), ":")
		return port
	case "id":
		return e.EngineID()
	case "uuid":
		return e.ID()
	case "kv":
		return e.KVAddress()
	case "listener":
		return e.Ranks[0].Side.Listener.Addr().String()
	case "events":
		return e.KVEventsEndpoint()
	case "replays":
		return e.KVEventsReplay()
	case "notify":
		return strconv.Itoa(e.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO).Notify)
	}
	if rank, ok := strings.CutPrefix(name, "side"); ok {
		_, port := e.Ranks[number(rank)].Side.HostPort()
		return fmt.Sprint(port)
	}
	r.fatalf("an engine has no field %q", name)
	return ""
}

// member returns the raw JSON of a member of an answer. text is the whole text, params
// the kv_transfer_params.
func (r *runner) member(x *exchange, path []string) string {
	r.t.Helper()
	switch path[0] {
	case "text":
		raw, _ := json.Marshal(x.text(r.t))
		return string(raw[1 : len(raw)-1])
	case "params":
		path = []string{"kv_transfer_params"}
	}
	raw := json.RawMessage(x.body)
	for _, name := range path {
		var list []json.RawMessage
		var object map[string]json.RawMessage
		if json.Unmarshal(raw, &list) == nil && number(name) < len(list) {
			raw = list[number(name)]
		} else if json.Unmarshal(raw, &object) == nil && object[name] != nil {
			raw = object[name]
		} else {
			r.fatalf("%s is not in %s", name, raw)
		}
	}
	return string(raw)
}
