package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// running is a started peer.
type running struct {
	peer  *peer
	scene *scene
	procs []*process // those of the peer itself
	all   []*process
	pids  []int
	took  time.Duration // from the start to the first good answer
}

// start starts a peer on cores ("0", "0,1") and waits for its first good answer.
func (h *shelf) start(ctx context.Context, p *peer, s *scene, cores string, engineCore int) (r *running, err error) {
	if s.dir, err = os.MkdirTemp("", "peer-"+p.bare()); err != nil {
		return nil, err
	}
	if s.listen, err = freeAddr(); err != nil {
		return nil, err
	}
	programs, err := p.start(h, s)
	if err != nil {
		return nil, err
	}
	r = &running{peer: p, scene: s}
	begin := time.Now()
	for i := len(programs) - 1; i >= 0; i-- { // the one that serves comes last
		pr := &programs[i]
		argv, core := append([]string{"taskset", "-c", cores}, pr.argv...), 0
		if pr.engine {
			argv, core = pr.argv, engineCore
		}
		proc, err := launch(ctx, s.dir, pr.name, core, argv...)
		if err != nil {
			r.stop()
			return nil, err
		}
		r.all = append(r.all, proc)
		if !pr.engine {
			r.procs = append(r.procs, proc)
		}
		if err := proc.await(func() error { return pr.isReady(ctx) }); err != nil {
			r.stop()
			return nil, fmt.Errorf("%s: %w", pr.name, err)
		}
	}
	last := r.procs[len(r.procs)-1]
	if err := last.await(func() error { return r.answers(ctx) }); err != nil {
		r.stop()
		return nil, fmt.Errorf("%s: %w", p.Name, err)
	}
	r.took = time.Since(begin)
	for _, proc := range r.procs {
		pids, err := family(proc.cmd.Process.Pid)
		if err != nil {
			r.stop()
			return nil, err
		}
		r.pids = append(r.pids, pids...)
	}
	return r, nil
}

func (p *program) isReady(ctx context.Context) error {
	if p.ready == "" {
		return nil
	}
	if err := accepts(p.ready); err != nil || p.path == "" {
		return err
	}
	status, text, err := get(ctx, "http://"+p.ready+p.path)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("GET %s: %d %s", p.path, status, text)
	}
	return err
}

// answers sends a small request.
func (r *running) answers(ctx context.Context) error {
	a, err := r.post(ctx, requestPath, probeBody(r.scene.model))
	if err != nil {
		return err
	}
	if a.status != http.StatusOK {
		return fmt.Errorf("answer %d: %.200s", a.status, a.body)
	}
	return nil
}

func probeBody(model string) []byte {
	return []byte(`{"model":"` + model + `","prompt":"hello","max_tokens":2}`)
}

// post sends one request to the peer.
func (r *running) post(ctx context.Context, path string, body []byte) (*reply, error) {
	return post(ctx, "http://"+r.scene.listen+path, r.header(), body)
}

func (r *running) header() string {
	if r.peer.header == nil {
		return ""
	}
	return r.peer.header(r.scene)
}

// engines returns the processes of the peer's own engines.
func (r *running) engines() (pids []int) {
	for _, p := range r.all {
		if !slices.Contains(r.pids, p.cmd.Process.Pid) {
			pids = append(pids, p.cmd.Process.Pid)
		}
	}
	return pids
}

func (r *running) stop() {
	for i := len(r.all) - 1; i >= 0; i-- {
		r.all[i].stop()
	}
	os.RemoveAll(r.scene.dir)
}

// reply is a whole answer.
type reply struct {
	status int
	body   []byte
}

var onceClient = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

func post(ctx context.Context, url, header string, body []byte) (*reply, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	if name, value, ok := strings.Cut(header, ": "); ok {
		q.Header.Set(name, value)
	}
	a, err := onceClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	return &reply{a.StatusCode, text}, err
}

func get(ctx context.Context, url string) (status int, body []byte, err error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	a, err := onceClient.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer a.Body.Close()
	body, err = io.ReadAll(a.Body)
	return a.StatusCode, body, err
}

func getJSON(ctx context.Context, url string, to any) error {
	status, text, err := get(ctx, url)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("GET %s: %d %.200s", url, status, text)
	}
	return json.Unmarshal(text, to)
}

// stub is the engines of the load: one process with several addresses.
type stub struct {
	*process
	engines []string
	prefill string
	boot    int
}

// startStub starts the engines: n of them, and one that only computes prompts.
// With record they keep the requests, with cache that many blocks of prompts.
func startStub(ctx context.Context, self, dir string, core, n int, flags ...string) (*stub, error) {
	s := &stub{}
	argv := []string{self, "backend"}
	for range n {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		s.engines = append(s.engines, addr)
		argv = append(argv, "-listen", addr)
	}
	for _, at := range []*string{&s.prefill, new(string)} {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		*at = addr
		if at != &s.prefill {
			s.boot, _ = strconv.Atoi(port(addr))
		}
	}
	argv = append(argv, "-prefill", s.prefill, "-bootstrap", strconv.Itoa(s.boot))
	var err error
	if s.process, err = launch(ctx, dir, "backend", core, append(argv, flags...)...); err != nil {
		return nil, err
	}
	s.addr = s.engines[0]
	return s, s.await(func() error { return accepts(s.prefill) })
}

// stubs are the engines of all works. Routers tell vLLM and SGLang apart, so
// each has a process.
type stubs struct{ vllm, sglang *stub }

func startStubs(ctx context.Context, self, dir string, core int, flags ...string) (*stubs, error) {
	vllm, err := startStub(ctx, self, dir, core, 1, flags...)
	if err != nil {
		return nil, err
	}
	sglang, err := startStub(ctx, self, dir, core, 1, append(flags, "-sglang")...)
	if err != nil {
		vllm.stop()
		return nil, err
	}
	return &stubs{vllm, sglang}, nil
}

func (s *stubs) of(work string) *stub {
	if work == workSGLang {
		return s.sglang
	}
	return s.vllm
}

func (s *stubs) stop() {
	s.vllm.stop()
	s.sglang.stop()
}

// scene returns the stub's engines for a work.
func (s *stub) scene(work string, cores int) *scene {
	c := &scene{engines: s.engines, model: benchModel, cores: cores}
	switch work {
	case workSGLang:
		c.prefill, c.boot = []string{s.prefill}, []int{s.boot}
	case workVLLM:
		c.prefill = []string{s.prefill}
	}
	return c
}
