package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// nameServer is a DNS server on UDP whose records the test sets.
type nameServer struct {
	t    *testing.T
	conn net.PacketConn

	mu      sync.Mutex
	ips     map[string][]string // addresses by name; names have no final dot
	srv     map[string][]srv    // SRV records by name
	failing map[string]bool     // names that are answered with SERVFAIL
	silent  bool                // the server answers no request
	asked   map[string]int      // answered requests by name
}

type srv struct {
	target string
	port   uint16
}

func startNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{t: t, conn: conn, ips: map[string][]string{}, srv: map[string][]srv{}, failing: map[string]bool{}, asked: map[string]int{}}
	done := make(chan struct{})
	go func() { s.serve(); close(done) }()
	t.Cleanup(func() { conn.Close(); <-done })
	return s
}

func (s *nameServer) serve() {
	buf := make([]byte, 1500)
	for {
		n, from, err := s.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if err := m.Unpack(buf[:n]); err != nil || len(m.Questions) != 1 {
			s.t.Errorf("question: %v", err)
			continue
		}
		answer := s.answer(m)
		if answer == nil {
			continue
		}
		out, err := answer.Pack()
		if err != nil {
			s.t.Error(err)
			continue
		}
		if _, err := s.conn.WriteTo(out, from); err != nil {
			return
		}
	}
}

func (s *nameServer) answer(m dnsmessage.Message) *dnsmessage.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silent {
		return nil
	}
	q := m.Questions[0]
	name := strings.TrimSuffix(q.Name.String(), ".")
	a := &dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true}, Questions: m.Questions}
	head := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET}
	for _, text := range s.ips[name] {
		switch ip := netip.MustParseAddr(text); {
		case ip.Is4() && q.Type == dnsmessage.TypeA:
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: ip.As4()}})
		case ip.Is6() && q.Type == dnsmessage.TypeAAAA:
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: ip.As16()}})
		}
	}
	if q.Type == dnsmessage.TypeSRV {
		for _, r := range s.srv[name] {
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.SRVResource{Port: r.port, Target: dnsmessage.MustNewName(r.target + ".")}})
		}
	}
	_, isHost := s.ips[name]
	_, isService := s.srv[name]
	switch {
	case s.failing[name]:
		a.RCode, a.Answers = dnsmessage.RCodeServerFailure, nil
	case !isHost && !isService:
		a.RCode = dnsmessage.RCodeNameError
	}
	s.asked[name]++
	return a
}

// set changes the server's answers.
func (s *nameServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// rounds waits for n more look-ups of a name. A look-up of both address families sends
// two requests.
func (s *nameServer) rounds(name string, n int) {
	s.t.Helper()
	s.mu.Lock()
	start := s.asked[name]
	s.mu.Unlock()
	eventually(s.t, "more lookups of "+name, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.asked[name] >= start+n
	})
}

// eventually waits for a condition. Its limit is long and makes no claim about speed.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// lookUp runs the discovery of some patterns.
func lookUp(t *testing.T, s *nameServer, family string, patterns ...config.Engine) (*fakeRegistry, *logs) {
	t.Helper()
	r, l := newFakeRegistry(), &logs{}
	m, err := New(config.Discovery{DNS: config.DiscoveryDNS{
		Interval: config.Duration(5 * time.Millisecond), Server: s.conn.LocalAddr().String(), Family: family, Engines: patterns,
	}}, options(r, l))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return r, l
}

func (r *fakeRegistry) has(names ...string) func() bool {
	return func() bool { return slices.Equal(r.names("dns"), names) }
}

func TestDNSAddresses(t *testing.T) {
	s := startNameServer(t)
	s.set(func() { s.ips["prefill.test"] = []string{"10.0.0.2", "10.0.0.1", "fd00::1"} })
	s.set(func() { s.ips["decode.test"] = []string{"10.0.1.1"} })
	p, d := spec("p", "http://prefill.test:8000/v"), spec("d", "https://decode.test")
	p.KVEvents, p.KVReplay, p.Ranks = "tcp://*:5557", "tcp://*:5558", 4
	r, _ := lookUp(t, s, "", p, d)
	eventually(t, "all are found", r.has("p@10.0.0.1", "p@10.0.0.2", "p@fd00::1", "d@10.0.1.1"))
	want := p
	want.Name, want.URL, want.KVEvents, want.KVReplay = "p@10.0.0.1", "http://10.0.0.1:8000/v", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"
	if got := r.spec(t, "dns", "p@10.0.0.1"); got != want {
		t.Errorf("got %+v", got)
	}
	want.Name, want.URL, want.KVEvents, want.KVReplay = "p@fd00::1", "http://[fd00::1]:8000/v", "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558"
	if got := r.spec(t, "dns", "p@fd00::1"); got != want {
		t.Errorf("got %+v", got)
	}
	if got := r.spec(t, "dns", "d@10.0.1.1").URL; got != "https://10.0.1.1" {
		t.Errorf("got %s", got)
	}
	s.set(func() { s.ips["prefill.test"] = []string{"10.0.0.2", "10.0.0.3"} })
	eventually(t, "addresses come and go", r.has("p@10.0.0.2", "p@10.0.0.3", "d@10.0.1.1"))
	s.set(func() { delete(s.ips, "prefill.test") })
	eventually(t, "a name that no longer exists has no engines", r.has("d@10.0.1.1"))
}

func TestDNSFamily(t *testing.T) {
	s := startNameServer(t)
	s.set(func() { s.ips["e.test"] = []string{"10.0.0.1", "fd00::1"} })
	r, _ := lookUp(t, s, "6", spec("e", "http://e.test"))
	eventually(t, "one family is found", r.has("e@fd00::1"))
	if got := r.spec(t, "dns", "e@fd00::1").URL; got != "http://[fd00::1]" {
		t.Errorf("got %s", got)
	}
}

func TestDNSServices(t *testing.T) {
	const name = "_vllm._tcp.llm.test"
	s := startNameServer(t)
	s.set(func() {
		s.srv[name] = []srv{{"node-b.test", 8001}, {"node-a.test", 8000}, {"node-a.test", 8001}, {"bad_name.test", 0}}
	})
	r, _ := lookUp(t, s, "", spec("e", "http://"+name))
	eventually(t, "all are found", r.has("e@node-a.test:8000", "e@node-a.test:8001", "e@node-b.test:8001"))
	if got := r.spec(t, "dns", "e@node-a.test:8001").URL; got != "http://node-a.test:8001" {
		t.Errorf("got %s", got)
	}
	s.set(func() { s.failing[name] = true })
	s.rounds(name, 5)
	if !r.has("e@node-a.test:8000", "e@node-a.test:8001", "e@node-b.test:8001")() {
		t.Errorf("engines are %v", r.names("dns"))
	}
	s.set(func() { s.failing[name], s.srv[name] = false, s.srv[name][:1] })
	eventually(t, "records go", r.has("e@node-b.test:8001"))
}

// A server that fails or does not answer removes no engine. An engine is removed only
// after three answers without it.
func TestDNSTroubleChangesNothing(t *testing.T) {
	s := startNameServer(t)
	s.set(func() { s.ips["e.test"] = []string{"10.0.0.1", "10.0.0.2"} })
	s.set(func() { s.ips["other.test"] = []string{"10.0.1.1"} })
	r, l := lookUp(t, s, "4", spec("e", "http://e.test"), spec("o", "http://other.test"))
	eventually(t, "all are found", r.has("e@10.0.0.1", "e@10.0.0.2", "o@10.0.1.1"))
	s.set(func() { s.failing["e.test"], s.ips["other.test"] = true, []string{"10.0.1.2"} })
	eventually(t, "the other name has engines", r.has("e@10.0.0.1", "e@10.0.0.2", "o@10.0.1.2"))
	s.rounds("e.test", 10)
	if !r.has("e@10.0.0.1", "e@10.0.0.2", "o@10.0.1.2")() {
		t.Errorf("engines are %v", r.names("dns"))
	}
	if text := l.take(); strings.Count(text, "discovery of engines failed") != 1 || !strings.Contains(text, "e.test") {
		t.Errorf("logged: %s", text)
	}
	s.set(func() { s.failing["e.test"], s.ips["e.test"] = false, []string{"10.0.0.2"} })
	eventually(t, "the registry drops the missing engines", r.has("e@10.0.0.2", "o@10.0.1.2"))
	eventually(t, "the end of the trouble is logged", func() bool { return strings.Contains(l.take(), "works again") })
}

func TestDNSMisses(t *testing.T) {
	d := newDNS(config.DiscoveryDNS{Engines: []config.Engine{spec("e", "http://e.test:1")}}, (&logs{}).logger())
	name := d.names[0]
	for round, hosts := range [][]string{{"10.0.0.1:1", "10.0.0.2:1"}, {}, {"10.0.0.2:1"}, {}} {
		if d.update(name, hosts); round < 3 && len(name.found) != 2 {
			t.Fatalf("round %d: %d engines remain", round, len(name.found))
		}
	}
	if len(name.found) != 1 || name.found["10.0.0.2:1"] == nil {
		t.Errorf("remaining engines: %v", name.found)
	}
}

// For any answers of a name server, discovery finds valid engines or none.
func FuzzDNSHost(f *testing.F) {
	f.Add("node-a.test", uint16(8000))
	f.Add("fd00::1", uint16(1))
	f.Add("a@b/../?x=#", uint16(80))
	f.Add("%zz\x00\n", uint16(65535))
	f.Fuzz(func(t *testing.T, target string, port uint16) {
		d := newDNS(config.DiscoveryDNS{Engines: []config.Engine{spec("e", "http://_a._tcp.test/v")}}, (&logs{}).logger())
		hosts := services([]*net.SRV{{Target: target, Port: port}})
		d.update(d.names[0], hosts)
		for _, e := range d.names[0].found {
			if err := e.spec.Check(); err != nil || !strings.HasSuffix(e.spec.URL, "/v") {
				t.Errorf("%q became %+v: %v", target, e.spec, err)
			}
		}
	})
}

// TestErrorsNameTheServer: an error of a lookup names the server of the configuration.
func TestErrorsNameTheServer(t *testing.T) {
	for server, want := range map[string]string{"127.0.0.1:1": "127.0.0.1:1", "": "10.255.255.53:53"} {
		s := newDNS(config.DiscoveryDNS{Server: server}, slog.New(slog.DiscardHandler))
		err := s.named(fmt.Errorf("lookup: %w", &net.DNSError{Err: "server misbehaving", Name: "p.test", Server: "10.255.255.53:53"}))
		if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "p.test") {
			t.Errorf("server %q: %v", server, err)
		}
		if other := errors.New("other"); s.named(other) != other || s.named(nil) != nil {
			t.Error("another error was changed")
		}
	}
	s := newDNS(config.DiscoveryDNS{Server: "127.0.0.1:1"}, slog.New(slog.DiscardHandler))
	_, err := s.lookup(t.Context(), &dnsName{url: &url.URL{Host: "p.test"}})
	if err == nil || !strings.Contains(s.named(err).Error(), "on 127.0.0.1:1") {
		t.Errorf("a lookup at a closed port: %v", s.named(err))
	}
}
