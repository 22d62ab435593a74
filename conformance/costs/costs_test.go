package costs

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// program is the built program.
var program string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pdproxy-costs")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "pdproxy")
	if out, err := exec.Command("go", "build", "-o", program, "./testdata/measured").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
		return 1
	}
	return isolated.Run(m)
}

// TestCosts compares the costs of the program with the numbers of testbed.Cost. Each step begins
// when the proxy sleeps, so that the number of reads, writes and allocations does not depend on the
// speed of the machine.
func TestCosts(t *testing.T) {
	if err := testbed.InstallStrace(); err != nil {
		t.Fatal(err)
	}
	t.Run("pass", func(t *testing.T) {
		e := &testbed.Engine{Name: "e0", Role: "both", Serve: whole}
		e.Start()
		defer e.Close()
		p := start(t, "none", e)
		c := p.dial()
		p.measure("request of 2 KB", 200, func() {
			c.send(2048, false)
			c.rest()
		})
	})
	t.Run("pd", func(t *testing.T) { splitRequests(t, "PD request of 2 KB", 2<<10, "") })
	t.Run("pd with ids", func(t *testing.T) { splitRequests(t, "PD request of 8 KB", 8<<10, "0.32.0") })
	t.Run("event", func(t *testing.T) {
		next := make(chan bool)
		e := &testbed.Engine{Name: "e0", Role: "both", Serve: stream(next)}
		e.Start()
		defer e.Close()
		p := start(t, "none", e)
		c := p.dial()
		c.send(2048, true)
		c.event()
		p.measure("event", 200, func() { next <- true; c.event() })
		close(next)
		c.rest()
	})
	t.Run("kept event", func(t *testing.T) {
		next := make(chan bool)
		e := &testbed.Engine{Name: "e0", Role: "both", Serve: streamOf(withIDs, next)}
		e.Start()
		defer e.Close()
		p := start(t, "vllm-nixl", e)
		c := p.dial()
		c.send(2048, true)
		c.event()
		p.measure("kept event", 200, func() { next <- true; c.event() })
		close(next)
		c.rest()
	})
	for name, event := range map[string]string{"open stream": withoutIDs, "kept open stream": withIDs} {
		t.Run(name, func(t *testing.T) { openStreams(t, name, event) })
	}
}

// splitRequests measures requests with prefill and decode. With a release, the engines take token ids,
// so that a prompt that is not short is tokenized once.
func splitRequests(t *testing.T, name string, size int, release string) {
	next := make(chan bool)
	prefill := &testbed.Engine{Name: "p0", Role: "prefill", Release: release, Serve: whole}
	decode := &testbed.Engine{Name: "d0", Role: "decode", Release: release, Serve: stream(next)}
	for _, e := range []*testbed.Engine{prefill, decode} {
		e.Start()
		defer e.Close()
	}
	p := start(t, "vllm-nixl", prefill, decode)
	c := p.dial()
	p.measure(name, 200, func() {
		c.send(size, true)
		c.event()
		p.idle()
		next <- false
		c.rest()
	})
	shared := strings.Contains(decode.Seen(nil)[0].Text, `"prompt":[1523,`)
	if want := release != ""; shared != want {
		t.Errorf("decode got token ids: %v, want %v", shared, want)
	}
}

// openStreams measures the memory of an open stream.
func openStreams(t *testing.T, name, event string) {
	next := make(chan bool)
	e := &testbed.Engine{Name: "e0", Role: "both", Serve: streamOf(event, next)}
	e.Start()
	defer e.Close()
	connector := "none"
	if event == withIDs {
		connector = "vllm-nixl" // another engine could continue its streams
	}
	p := start(t, connector, e)
	const streams = 400
	open := func(n int) {
		for range n {
			c := p.dial()
			c.send(2048, true)
			c.event()
		}
		p.idle()
	}
	open(streams)
	before := p.memory()
	open(streams)
	after := p.memory()
	testbed.Cost(t, name+": bytes", float64(after.HeapAlloc+after.StackInuse-before.HeapAlloc-before.StackInuse)/streams)
	close(next)
}

// answer is a whole answer of an engine, with the parameters by which decode pulls the KV.
const answer = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"x","finish_reason":"length"}],` +
	`"usage":{"prompt_tokens":500,"completion_tokens":1,"total_tokens":501},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,` +
	`"remote_engine_id":"e1","remote_block_ids":[1,2,3,4],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`

// answerWithIDs is the answer to a leg that asks for the token ids of its prompt.
var answerWithIDs = strings.Replace(answer, `"text":"x"`, `"text":"x","prompt_token_ids":[`+strings.Repeat("1523,", 499)+`1523]`, 1)

func whole(w http.ResponseWriter, leg testbed.Leg) {
	w.Header().Set("Content-Type", "application/json")
	if strings.Contains(leg.Text, `"return_token_ids":true`) {
		io.WriteString(w, answerWithIDs)
		return
	}
	io.WriteString(w, answer)
}

// stream answers a leg with one event, and with a further one for each true of next. The end is
// at the first false, or when next is closed.
func stream(next <-chan bool) func(http.ResponseWriter, testbed.Leg) {
	return streamOf(withoutIDs, next)
}

// Events of an engine, without and with the token ids that the proxy asks for if it may continue the
// stream.
const (
	withoutIDs = `data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":null}]}` + "\n\n"
	withIDs    = `data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":null,"prompt_token_ids":null,"token_ids":[1523]}]}` + "\n\n"
)

// streamOf is stream with that event.
func streamOf(event string, next <-chan bool) func(http.ResponseWriter, testbed.Leg) {
	return func(w http.ResponseWriter, leg testbed.Leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		first := strings.Replace(event, `"prompt_token_ids":null`, `"prompt_token_ids":[1,2,3]`, 1)
		for more := true; more; {
			io.WriteString(w, first)
			first = event
			w.(http.Flusher).Flush()
			select {
			case more = <-next:
			case <-leg.Context().Done():
				return
			}
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}
}

// proxy is a running program.
type proxy struct {
	t       *testing.T
	addr    string
	cmd     *exec.Cmd
	control io.Writer
	reports *json.Decoder
}

// start starts the program and waits until it serves.
func start(t *testing.T, connector string, engines ...*testbed.Engine) *proxy {
	t.Helper()
	p := &proxy{t: t, addr: testbed.FreeAddr(t)}
	var text strings.Builder
	fmt.Fprintf(&text, "[server]\nlisten = %q\n[admin]\nlisten = %q\n[health]\ninterval = \"1h\"\nload_interval = \"0s\"\n", p.addr, testbed.FreeAddr(t))
	text.WriteString("[limits]\nper_client = 0\nmax_connections_per_address = -1\n")
	for _, e := range engines {
		fmt.Fprintf(&text, "[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\n", e.Name, e.URL(), e.Role, connector)
	}
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	log := &testbed.Log{}
	p.cmd = exec.Command(program, "run", file)
	p.cmd.Env = append(os.Environ(), "GOMAXPROCS=2")
	p.cmd.Stderr = log
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.control, p.reports = in, json.NewDecoder(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	testbed.Eventually(t, "the proxy serves", func() bool {
		resp, err := http.Get("http://" + p.addr + "/health")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return p
}

// memory returns the statistics of the program's memory after a garbage collection.
func (p *proxy) memory() (m struct{ Mallocs, HeapAlloc, StackInuse uint64 }) {
	p.t.Helper()
	io.WriteString(p.control, "\n")
	if err := p.reports.Decode(&m); err != nil {
		p.t.Fatal(err)
	}
	return m
}

// measure checks the system calls and the allocations of a step.
func (p *proxy) measure(name string, n int, step func()) {
	p.t.Helper()
	all := func(n int) {
		for range n {
			step()
			p.idle()
		}
	}
	all(n) // fills pools, opens connections
	const repeats = 4
	var mallocs []float64
	var took time.Duration
	for range 3 {
		before, began := p.memory().Mallocs, time.Now()
		all(repeats * n)
		took = time.Since(began)
		mallocs = append(mallocs, float64(p.memory().Mallocs-before))
	}
	slices.Sort(mallocs)
	// Timers and the history of the dashboard allocate in each period of this length. The program gives
	// memory back in the first quiet second after a load. Giving back allocates once, so that it is not
	// part of the period.
	time.Sleep(2100 * time.Millisecond)
	quiet := p.memory().Mallocs
	time.Sleep(took)
	idle := float64(p.memory().Mallocs - quiet)
	testbed.Cost(p.t, name+": allocations", (mallocs[1]-idle)/float64(repeats*n))
	testbed.Cost(p.t, name+": system calls", float64(p.calls(func() { all(n) }))/float64(n))
}

// idle waits until no thread of the program runs or wants to run. The process may have slept
// before, while a step was in a socket.
func (p *proxy) idle() {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	used := func() (t unix.Timespec) {
		if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil { // CPUCLOCK_SCHED of a process
			p.t.Fatal(err)
		}
		return t
	}
	for end := time.Now().Add(45 * time.Second); ; {
		before := used()
		if sleeps(pid) && used() == before {
			return
		}
		if time.Now().After(end) {
			p.t.Fatal("the proxy never sleeps")
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// sleeps reports whether all threads of a process sleep.
func sleeps(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		if _, rest, ok := strings.Cut(string(text), ") "); !ok || rest[0] != 'S' {
			return false
		}
	}
	return len(threads) > 0
}

// client is one connection to the proxy.
type client struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
	resp *http.Response
	body *bufio.Reader
}

func (p *proxy) dial() *client {
	p.t.Helper()
	conn, err := net.Dial("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	return &client{t: p.t, conn: conn, in: bufio.NewReader(conn)}
}

// send sends a request whose body has size bytes, in one write, and reads the head of the answer.
func (c *client) send(size int, stream bool) {
	c.t.Helper()
	body := fmt.Sprintf(`{"model":"sim","stream":%t,"max_tokens":16,"prompt":"`, stream)
	body += strings.Repeat("x", size-len(body)-2) + `"}`
	request := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if _, err := io.WriteString(c.conn, request); err != nil {
		c.t.Fatal(err)
	}
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	if c.resp, c.body = resp, bufio.NewReader(resp.Body); resp.StatusCode != http.StatusOK {
		c.rest()
	}
}

// rest reads the rest of a good answer.
func (c *client) rest() {
	c.t.Helper()
	text, err := io.ReadAll(c.body)
	if err != nil || c.resp.StatusCode != http.StatusOK {
		c.t.Fatalf("%s %v: %s", c.resp.Status, err, text)
	}
}

// event reads one event.
func (c *client) event() {
	c.t.Helper()
	for range 2 {
		if _, err := c.body.ReadSlice('\n'); err != nil {
			c.t.Fatal(err)
		}
	}
}
