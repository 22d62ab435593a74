package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// here reports whether the worker made a placement without the coordinator.
func here(p *coordinator.Placement) bool {
	return slices.Contains(p.Fallbacks, coordinator.Fallback{What: "place", Reason: coordinator.ReasonCoordinator})
}

// holds fails the test unless the coordinator has this number of leases.
func (w *wired) holds(t *testing.T, leases int) {
	t.Helper()
	synctest.Wait()
	if w.Open() != leases {
		t.Errorf("the coordinator holds %d leases, want %d", w.Open(), leases)
	}
	rows := w.server.Workers()
	if leases > 0 && (len(rows) != 1 || rows[0].Leases != leases) {
		t.Errorf("workers %+v, want one with %d leases", rows, leases)
	}
}

// TestConnectionLost: the coordinator drops a worker's leases with its connection. The
// next connection restores the leases that are still open.
func TestConnectionLost(t *testing.T) {
	for name, lose := range map[string]func(*wired){
		"cut":    func(w *wired) { w.pipes.last().cut() },
		"left":   func(w *wired) { w.client.Redial() },
		"thrown": func(w *wired) { w.server.workers[1].conn.Close(errors.New("away with it")) },
	} {
		bubble(t, name, nil, func(t *testing.T, w *wired) {
			computing, streaming, ended := w.Must(t, placetest.NewPlacementRequest()), w.Must(t, placetest.NewPlacementRequest()), w.Must(t, placetest.NewPlacementRequest())
			streaming.Lease.PrefillDone()
			later(link.Linger)
			w.holds(t, 3)
			p, d := &computing.Prefill.Load[0], &computing.Decode.Load[0]
			if p.Requests() != 2 || d.Requests() != 3 {
				t.Fatalf("%d and %d requests", p.Requests(), d.Requests())
			}
			w.pipes.fall(true)
			lose(w)
			later(2 * link.Linger) // the peer does not read continuously
			w.holds(t, 0)
			if p.Requests() != 0 || d.Requests() != 0 || w.LiveIDs() != 0 {
				t.Errorf("%d and %d requests and %d ids remain", p.Requests(), d.Requests(), w.LiveIDs())
			}
			ended.Lease.Release()
			alone := w.Must(t, placetest.NewPlacementRequest())
			if !here(alone) {
				t.Error("the fallback of a lone worker did not place the request")
			}
			w.pipes.fall(false)
			later(time.Second)
			w.holds(t, 3)
			if d.Requests() != 3+1 { // the fourth is alone: the worker counts it in the same counters
				t.Errorf("got %d streams", d.Requests())
			}
			if w.LiveIDs() != 3 {
				t.Errorf("%d ids in flight", w.LiveIDs())
			}
			next := w.Must(t, placetest.NewPlacementRequest())
			if here(next) {
				t.Error("the coordinator is connected again, and the worker does not use it")
			}
			for _, p := range []*coordinator.Placement{computing, streaming, ended, alone, next} {
				p.Lease.PrefillDone()
				p.Lease.Release()
			}
			later(link.Linger)
			w.Idle(t)
		})
	}
}

// TestPhaseOfAnAdoption: an adopted lease whose prefill is done holds no prefill load.
func TestPhaseOfAnAdoption(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		p := w.Must(t, placetest.NewPlacementRequest())
		counter := &p.Prefill.Load[0]
		for round := range 3 {
			if round == 1 {
				p.Lease.PrefillDone()
			}
			want := int64(100)
			if round > 0 {
				want = 0
			}
			w.client.Redial()
			later(time.Second)
			w.holds(t, 1)
			if counter.Tokens() != want || counter.Queued() != want {
				t.Errorf("round %d: prefill carries %d tokens, %d queued, want %d", round, counter.Tokens(), counter.Queued(), want)
			}
		}
		p.Lease.Release()
		later(time.Second)
		w.Idle(t)
	})
}

// listed is a remoteLease that stays in the client's list after its release.
type listed struct{ *remoteLease }

func (listed) Forget() {}

// TestReleaseDuringReconnect: the client does not report a released lease to a new
// coordinator, even if the lease is still in the client's list.
func TestReleaseDuringReconnect(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		p := w.Must(t, placetest.NewPlacementRequest())
		remote := listed{w.client.open}
		p.Lease.Attach(remote)
		p.Lease.Release()
		w.client.Redial()
		later(time.Second)
		w.Idle(t)
		remote.remoteLease.Forget()
	})
}

// TestLateAnswers: no call waits longer than the patience. After a late answer the next
// calls do not wait until the coordinator has sent a frame. The client returns a lease
// that comes too late.
func TestLateAnswers(t *testing.T) {
	bubble(t, "slow policy", nil, func(t *testing.T, w *wired) {
		var slow atomic.Bool
		slow.Store(true)
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			if slow.Load() {
				time.Sleep(300 * time.Millisecond)
			}
			return abi.PlaceDecision{Prefill: 0, Decode: 1}, "slow", true
		}})
		began := time.Now()
		first := w.Must(t, placetest.NewPlacementRequest())
		took := time.Since(began)
		if !here(first) || took < DefaultPatience || took > DefaultPatience+2*link.Linger {
			t.Errorf("placed by %v after %v", first.Fallbacks, took)
		}
		began = time.Now()
		second := w.Must(t, placetest.NewPlacementRequest())
		if !here(second) || time.Since(began) != 0 {
			t.Errorf("the second waited %v, fallbacks %v", time.Since(began), second.Fallbacks)
		}
		slow.Store(false)
		later(time.Second) // the answer shows that the coordinator lives
		w.holds(t, 2)      // the two leases that the worker placed; the late one was returned
		third := w.Must(t, placetest.NewPlacementRequest())
		if here(third) || third.Policy != "slow" {
			t.Errorf("placement after a frame from the coordinator: fallbacks %v, policy %q", third.Fallbacks, third.Policy)
		}
		for _, p := range []*coordinator.Placement{first, second, third} {
			p.Lease.Release()
		}
		later(time.Second)
		w.Idle(t)
	})
	bubble(t, "silence", nil, func(t *testing.T, w *wired) {
		c := w.pipes.last()
		c.hold()
		began := time.Now()
		for n := range 100 {
			p := w.Must(t, placetest.NewPlacementRequest())
			defer p.Lease.Release()
			if n > 0 && !here(p) { // the first answer came before the connection became silent
				t.Fatal("the coordinator answered through a cut connection")
			}
		}
		if took := time.Since(began); took > 3*DefaultPatience {
			t.Errorf("a hundred waited %v together", took)
		}
		later(link.Silence*link.Beat + 2*link.Beat)
		if w.pipes.last() == c {
			t.Error("the worker does not try again")
		}
		c.let()
		later(time.Second)
		w.holds(t, 100)
	})
}

// TestCancelledPlace: if a client leaves while its request is being placed, no lease is
// left.
func TestCancelledPlace(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			time.Sleep(20 * time.Millisecond)
			return abi.PlaceDecision{Prefill: 0, Decode: 1}, "slow", true
		}})
		ctx, cancel := context.WithCancelCause(t.Context())
		left := errors.New("left")
		time.AfterFunc(10*time.Millisecond, func() { cancel(left) })
		if _, err := w.client.Place(ctx, placetest.NewPlacementRequest()); !errors.Is(err, left) {
			t.Error(err)
		}
		if _, err := w.client.Place(ctx, placetest.NewPlacementRequest()); !errors.Is(err, left) {
			t.Error(err)
		}
		later(time.Second)
		w.holds(t, 0)
		w.Idle(t)
	})
}

// TestSlowPlacementsHoldUpNobody: a slow placement does not delay others of the same
// connection.
func TestSlowPlacementsHoldUpNobody(t *testing.T) {
	bubble(t, "pair", func(_ *ServerOptions, co *ClientOptions) { co.Patience = time.Hour }, func(t *testing.T, w *wired) {
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			time.Sleep(10 * time.Millisecond)
			return abi.PlaceDecision{Prefill: 0, Decode: 1}, "slow", true
		}})
		var placing sync.WaitGroup
		began := time.Now()
		for range 50 {
			placing.Go(func() {
				p, err := w.client.Place(t.Context(), placetest.NewPlacementRequest())
				if err != nil {
					t.Error(err)
					return
				}
				p.Lease.Release()
			})
		}
		placing.Wait()
		if took := time.Since(began); took >= 50*10*time.Millisecond {
			t.Errorf("fifty simultaneous requests took %v", took)
		}
		later(time.Second)
		w.Idle(t)
	})
}

// TestEpochs: a worker follows the highest epoch that it has known.
func TestEpochs(t *testing.T) {
	bubble(t, "fenced", nil, func(t *testing.T, w *wired) {
		for _, tt := range []struct {
			epoch  uint64
			follow bool
		}{{4, false}, {6, true}, {5, false}, {6, true}, {7, true}} {
			w.server.StandBy()
			w.server.Lead(tt.epoch)
			later(2 * time.Second)
			p := w.Must(t, placetest.NewPlacementRequest())
			if here(p) == tt.follow {
				t.Errorf("epoch %d: fallbacks %v", tt.epoch, p.Fallbacks)
			}
			p.Lease.Release()
		}
		later(time.Second)
		w.Idle(t)
	})
}

func TestToken(t *testing.T) {
	for _, tt := range []struct {
		coordinator, worker string
		works               bool
	}{{"", "", true}, {"sesame", "sesame", true}, {"sesame", "", false}, {"", "sesame", false}, {"sesame", "sesam", false}} {
		bubble(t, tt.coordinator+" "+tt.worker, func(so *ServerOptions, co *ClientOptions) {
			so.Token, co.Token = []byte(tt.coordinator), []byte(tt.worker)
		}, func(t *testing.T, w *wired) {
			later(time.Second)
			if w.client.Connected() != tt.works || len(w.server.Workers()) == 1 != tt.works {
				t.Errorf("connected %v, workers %v", w.client.Connected(), w.server.Workers())
			}
		})
	}
}

// TestStrangers: a connection without a worker's first byte is passed on as HTTP. A
// connection with that byte but another greeting is closed.
func TestStrangers(t *testing.T) {
	bubble(t, "http", nil, func(t *testing.T, w *wired) {
		l := w.server.Others(w.pipes.Addr())
		mine, theirs := net.Pipe()
		defer mine.Close()
		w.pipes.conns <- theirs
		go mine.Write([]byte("GET / HTTP/1.1\r\n"))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		b := make([]byte, 16)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "GET / HTTP/1.1\r\n" {
			t.Errorf("%q: io.ReadFull(c, b) = %v, want nil", b, err)
		}
		l.Close()
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	whole := hello()
	older := slices.Clone(whole)
	older[len(magic)] = version + 1
	for name, b := range map[string][]byte{
		"nothing":            nil,
		"half a greeting":    whole[:len(whole)/2],
		"no more":            whole,
		"another protocol":   append([]byte(magic[:3]), make([]byte, 64)...),
		"another version":    older,
		"no proof":           append(slices.Clone(whole), make([]byte, 2+64)...),
		"too much of itself": append(slices.Clone(whole), 0xff, 0xff),
	} {
		bubble(t, name, nil, func(t *testing.T, w *wired) {
			mine, theirs := net.Pipe()
			defer mine.Close()
			w.pipes.conns <- theirs
			go mine.Write(b)
			began := time.Now()
			if _, err := io.Copy(io.Discard, mine); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > access.GreetingLimit {
				t.Errorf("the unauthenticated connection lasted %v", took)
			}
			if n := len(w.server.Workers()); n != 1 {
				t.Errorf("got %d workers", n)
			}
		})
	}
}

// TestGarbageFromAWorker: a malformed frame ends the worker's connection and leases.
func TestGarbageFromAWorker(t *testing.T) {
	long := slices.Repeat([]byte{0xff}, 20)
	for name, send := range map[string]func(s *session){
		"a broken ask":     func(s *session) { s.link.Call(context.Background(), kindOf(fleetpb.Kind_KIND_PLACE), long, nil, 0) },
		"an empty ask":     func(s *session) { s.link.Call(context.Background(), kindOf(fleetpb.Kind_KIND_PLACE), nil, nil, 0) },
		"a broken release": func(s *session) { s.link.Send(kindOf(fleetpb.Kind_KIND_RELEASE), long, true) },
		"a lease again": func(s *session) {
			s.link.Send(kindOf(fleetpb.Kind_KIND_ADOPT), fleetpb.Append(nil, adoption(1, &coordinator.Adoption{}, placetest.Same{}, nil)), true)
		},
	} {
		bubble(t, name, nil, func(t *testing.T, w *wired) {
			p := w.Must(t, placetest.NewPlacementRequest())
			w.pipes.fall(true)
			send(w.client.session.Load())
			later(2 * link.Linger) // the peer does not read continuously
			w.holds(t, 0)
			if n := len(w.server.Workers()); n != 0 {
				t.Errorf("got %d workers", n)
			}
			p.Lease.Release()
		})
	}
}

// TestTopics: the latest value of each topic reaches all workers. A worker that connects
// later gets the values before any other frame.
func TestTopics(t *testing.T) {
	var heard []string // written by the reader; read after everything has arrived
	var reports []string
	var came []string
	bubble(t, "topics", func(so *ServerOptions, co *ClientOptions) {
		heard, reports, came = nil, nil, nil
		co.OnTopic = func(topic Topic, value []byte) error {
			heard = append(heard, fmt.Sprintf("%d %s", topic, value))
			return nil
		}
		so.OnReport = func(worker int, report []byte) { reports = append(reports, fmt.Sprintf("%d %s", worker, report)) }
		so.OnWorker = func(w WorkerRow, here bool) {
			came = append(came, fmt.Sprintf("%d %d %s %v", w.Number, w.Slot, w.Node, here))
		}
	}, func(t *testing.T, w *wired) {
		expect := func(what string, got *[]string, want ...string) {
			t.Helper()
			synctest.Wait()
			if !slices.Equal(*got, want) {
				t.Errorf("%s: %q, want %q", what, *got, want)
			}
			*got = nil
		}
		w.server.Publish(TopicMembership, []byte("a"))
		w.server.Publish(TopicLoads, []byte("b"))
		w.server.Publish(TopicMembership, []byte("c"))
		expect("published", &heard, "1 a", "2 b", "1 c")
		w.server.Publish(TopicMembership, make([]byte, link.MaxFrame))
		expect("too large", &heard)
		if !w.client.Report([]byte("x")) || !w.client.Report([]byte("y")) {
			t.Error("Report = false with a connection")
		}
		later(link.Linger)
		expect("reports", &reports, "1 x", "1 y")
		w.pipes.fall(true)
		w.client.Redial()
		later(time.Second)
		if w.client.Report([]byte("z")) {
			t.Error("Report = true without a connection")
		}
		w.server.Publish(TopicLoads, []byte("d"))
		w.pipes.fall(false)
		later(time.Second)
		expect("to a worker that connects later", &heard, "1 c", "2 d")
		expect("workers", &came, "1 3 here true", "1 3 here false", "2 3 here true")
	})
	// A worker that cannot read a value disconnects and places requests with its
	// fallback. It connects again until it can read the value.
	var strange atomic.Bool
	bubble(t, "not understood", func(_ *ServerOptions, co *ClientOptions) {
		co.OnTopic = func(Topic, []byte) error {
			if strange.Load() {
				return errors.New("unknown text")
			}
			return nil
		}
	}, func(t *testing.T, w *wired) {
		strange.Store(true)
		w.server.Publish(TopicMembership, []byte("?"))
		later(10 * time.Second)
		if p := w.Must(t, placetest.NewPlacementRequest()); !here(p) || w.client.Connected() {
			t.Errorf("got fallbacks %v, connected %v", p.Fallbacks, w.client.Connected())
		} else {
			p.Lease.Release()
		}
		if n := w.pipes.dials(); n < 5 || n > 25 {
			t.Errorf("got %d connections in ten seconds", n)
		}
		strange.Store(false)
		later(2 * time.Second)
		p := w.Must(t, placetest.NewPlacementRequest())
		if here(p) {
			t.Error("the worker does not reconnect")
		}
		p.Lease.Release()
		later(2 * link.Linger)
		w.Idle(t)
	})
	bubble(t, "needs", nil, func(t *testing.T, w *wired) {
		if w.client.Needs() != 0 {
			t.Errorf("needs %v", w.client.Needs())
		}
		w.SetDecider(placetest.Stub{Wants: abi.NeedBlocks | abi.NeedConversation})
		w.Must(t, placetest.NewPlacementRequest()).Lease.Release() // the release is sent with the answer
		var c, own coordinator.Cut
		w.client.Cut(&c, "m")
		w.Local.Cut(&own, "m")
		if w.client.Needs() != abi.NeedBlocks|abi.NeedConversation || len(c.Forms) != 1 || !slices.Equal(c.Forms, own.Forms) || c.Model != own.Model {
			t.Errorf("needs %v, cut %+v, want %+v", w.client.Needs(), c, own)
		}
	})
}

// TestHeaders: a worker learns the names that the coordinator's policies declare, also after
// they change, and the coordinator's policies get the values of a request.
func TestHeaders(t *testing.T) {
	bubble(t, "headers", nil, func(t *testing.T, w *wired) {
		var got []abi.RequestHeader
		w.SetDecider(placetest.Stub{
			Wants: abi.NeedHeaders, WantedHeaders: []string{"x-tier", "x-region"},
			OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
				got = f.Request.Headers
				return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
			},
		})
		a := placetest.NewPlacementRequest()
		a.Request.Headers = []abi.RequestHeader{{Name: "x-tier", Value: "gold", Present: true, Cut: true}, {Name: "x-region", Present: true}}
		w.Must(t, a).Lease.Release()
		if !slices.Equal(got, a.Request.Headers) {
			t.Errorf("the coordinator's policy got %+v", got)
		}
		if names := w.client.Headers(); w.client.Needs() != abi.NeedHeaders || !slices.Equal(names, []string{"x-tier", "x-region"}) {
			t.Errorf("needs %v, headers %q", w.client.Needs(), names)
		}
		w.SetDecider(placetest.Stub{Wants: abi.NeedHeaders, WantedHeaders: []string{"x-region"}})
		w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
		if names := w.client.Headers(); !slices.Equal(names, []string{"x-region"}) {
			t.Errorf("after a change: headers %q", names)
		}
	})
}

// TestAsk: the coordinator queries a worker's admin data.
func TestAsk(t *testing.T) {
	admin := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/exchanges":
			body, _ := io.ReadAll(r.Body)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(202)
			w.WriteHeader(500)
			fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.RawQuery, body)
		case "/slow":
			<-r.Context().Done()
		case "/large":
			w.Write(make([]byte, link.MaxFrame))
		}
	})
	bubble(t, "admin", func(_ *ServerOptions, co *ClientOptions) { co.Admin = admin }, func(t *testing.T, w *wired) {
		status, kind, body, err := w.server.Ask(t.Context(), 1, "POST", "/v1/exchanges?x=1", []byte("hi"))
		if err != nil || status != 202 || kind != "application/json" || string(body) != "POST x=1 hi" {
			t.Errorf(`w.server.Ask = %d, %q, %q, %v, want 202, "application/json", "POST x=1 hi", nil`, status, kind, body, err)
		}
		if status, _, body, err := w.server.Ask(t.Context(), 1, "GET", "/else", nil); err != nil || status != 200 || len(body) != 0 {
			t.Errorf(`w.server.Ask(1, "GET", "/else", nil) = %d, %q, %v`, status, body, err)
		}
		if status, _, _, err := w.server.Ask(t.Context(), 1, "GET ", ":", nil); err != nil || status != 400 {
			t.Errorf("a request that is none: %d %v", status, err)
		}
		if status, _, _, err := w.server.Ask(t.Context(), 1, "GET", "/large", nil); err != nil || status != 507 {
			t.Errorf("an answer that does not fit: %d %v", status, err)
		}
		if _, _, _, err := w.server.Ask(t.Context(), 9, "GET", "/", nil); err == nil {
			t.Error("a worker that there is not answers")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, _, err := w.server.Ask(ctx, 1, "GET", "/slow", nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		for range maxAsks {
			go w.server.Ask(ctx, 1, "GET", "/slow", nil)
		}
		synctest.Wait()
		if status, _, _, err := w.server.Ask(t.Context(), 1, "GET", "/else", nil); err != nil || status != 200 && status != 503 {
			t.Errorf(`w.server.Ask(1, "GET", "/else", nil) = %d, %v`, status, err)
		}
	})
	bubble(t, "none", nil, func(t *testing.T, w *wired) {
		if status, _, _, err := w.server.Ask(t.Context(), 1, "GET", "/", nil); err != nil || status != 503 {
			t.Errorf(`w.server.Ask(1, "GET", "/", nil) = %d, %v, want 503, nil`, status, err)
		}
	})
}

// TestAskEndsWithConnection: an admin request that has no answer yet does not delay the
// next connection.
func TestAskEndsWithConnection(t *testing.T) {
	admin := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	bubble(t, "cut", func(_ *ServerOptions, co *ClientOptions) { co.Admin = admin }, func(t *testing.T, w *wired) {
		ended := make(chan error, 1)
		go func() {
			_, _, _, err := w.server.Ask(t.Context(), 1, "GET", "/slow", nil)
			ended <- err
		}()
		synctest.Wait()
		before := w.pipes.dials()
		w.pipes.last().cut()
		if err := <-ended; err == nil {
			t.Error("a request of a connection that broke got an answer")
		}
		later(10 * time.Second)
		if w.pipes.dials() == before || !w.client.Connected() {
			t.Errorf("10 s after the connection broke: %d more dials, connected %v", w.pipes.dials()-before, w.client.Connected())
		}
	})
}

// TestOrphans: the coordinator does the clean-ups of a worker if, and only if, the worker
// has died.
func TestOrphans(t *testing.T) {
	for _, tt := range []struct {
		name string
		life func(w *wired, p *coordinator.Placement)
		end  func(w *wired)
		want string
	}{
		{"died between the legs", nil, (*wired).die, "free it"},
		{"died later", func(_ *wired, p *coordinator.Placement) { p.Lease.Answered(true) }, (*wired).die, ""},
		{"had ended", func(_ *wired, p *coordinator.Placement) { p.Lease.Release() }, (*wired).die, ""},
		{"left", nil, func(w *wired) { w.stop(); w.gone.Wait() }, ""},
		{"was cut off", nil, func(w *wired) { w.pipes.last().cut() }, ""},
		{"lost its connection, reconnected and died", func(w *wired, _ *coordinator.Placement) {
			w.pipes.last().cut()
			later(2 * time.Second)
		}, (*wired).die, "free it"},
		{"lost its connection after its answer had begun, reconnected and died", func(w *wired, p *coordinator.Placement) {
			p.Lease.Answered(true)
			w.pipes.last().cut()
			later(2 * time.Second)
		}, (*wired).die, ""},
		{"was cut off within a frame", nil, func(w *wired) {
			w.pipes.fall(true)
			w.pipes.last().Write(make([]byte, 5))
			w.pipes.last().cut()
		}, ""},
		{"lost its connection, reconnected and left", nil, func(w *wired) {
			w.pipes.last().cut()
			later(100 * time.Millisecond)
			w.stop()
			w.gone.Wait()
		}, ""},
		{"receives nothing any more", nil, func(w *wired) {
			w.pipes.fall(true)
			w.pipes.last().hold()
			later((link.Silence + 1) * link.Beat)
		}, ""},
		{"does not understand", nil, func(w *wired) {
			w.pipes.fall(true)
			w.server.mu.Lock()
			defer w.server.mu.Unlock()
			w.server.workers[1].conn.Send(kindOf(fleetpb.Kind_KIND_TOPIC), []byte{0xff}, true)
		}, ""},
		{"is not understood", nil, func(w *wired) {
			w.pipes.fall(true)
			w.client.session.Load().link.Call(context.Background(), kindOf(fleetpb.Kind_KIND_PLACE), nil, nil, 0)
		}, ""},
		{"died just before the coordinator stepped down", nil, func(w *wired) {
			w.die()
			later(100 * time.Millisecond)
			w.stepDown(t)
		}, "free it"},
		{"was left by a coordinator that stepped down", nil, func(w *wired) { w.stepDown(t) }, ""},
		{"of another host was cut off just before that", func(w *wired, _ *coordinator.Placement) {
			w.pipes.move()
			w.client.Redial()
			later(time.Second)
		}, func(w *wired) {
			w.die()
			later(100 * time.Millisecond)
			w.stepDown(t)
		}, ""},
		{"of another host died", func(w *wired, _ *coordinator.Placement) {
			w.pipes.move()
			w.client.Redial()
			later(time.Second)
		}, (*wired).die, "free it"},
	} {
		bubble(t, tt.name, nil, func(t *testing.T, w *wired) {
			p := w.Must(t, placetest.NewPlacementRequest())
			if !p.Lease.WantsOrphanCleanup() {
				t.Fatal("WantsOrphanCleanup = false with a coordinator")
			}
			p.Lease.SetOrphanCleanup([]byte("free it"))
			p.Lease.PrefillDone()
			synctest.Wait() // the message is sent at once
			if tt.life != nil {
				tt.life(w, p)
				later(link.Linger)
			}
			tt.end(w)
			later(2 * reconnectGrace)
			got := ""
			select {
			case got = <-w.orphans:
			default:
			}
			if got != tt.want || len(w.orphans) > 0 {
				t.Errorf("%q was to be freed, and %d more, want %q", got, len(w.orphans), tt.want)
			}
		})
	}
	t.Run("of one process", func(t *testing.T) {
		w := newWorld(t, "p prefill", "d decode")
		p := w.Must(t, placetest.NewPlacementRequest())
		if p.Lease.WantsOrphanCleanup() {
			t.Error("WantsOrphanCleanup = true without a coordinator")
		}
		p.Lease.SetOrphanCleanup([]byte("free it"))
		p.Lease.Release()
	})
}

// TestOrphansWhilePrefillComputes: a clean-up that is registered before PrefillDone is run if the
// worker dies, until PrefillDone replaces it. A reconnected worker has it at its new coordinator.
func TestOrphansWhilePrefillComputes(t *testing.T) {
	reconnect := func(w *wired) {
		w.pipes.last().cut()
		later(2 * time.Second)
	}
	for _, tt := range []struct {
		name string
		life func(w *wired, l *coordinator.Lease)
		want string
	}{
		{"at once", func(*wired, *coordinator.Lease) {}, "write it"},
		{"registered without a connection", func(w *wired, l *coordinator.Lease) {
			w.pipes.last().cut()
			synctest.Wait()
			l.RegisterOrphanCleanup([]byte("write all"))
			later(2 * time.Second)
		}, "write all"},
		{"reconnected", func(w *wired, _ *coordinator.Lease) { reconnect(w) }, "write it"},
		{"no need after PrefillDone", func(_ *wired, l *coordinator.Lease) {
			l.SetOrphanCleanup(nil)
			l.PrefillDone()
		}, ""},
		{"no need after PrefillDone, reconnected", func(w *wired, l *coordinator.Lease) {
			l.SetOrphanCleanup(nil)
			l.PrefillDone()
			reconnect(w)
		}, ""},
		{"another need after PrefillDone", func(_ *wired, l *coordinator.Lease) {
			l.SetOrphanCleanup([]byte("free it"))
			l.PrefillDone()
		}, "free it"},
		{"answered", func(_ *wired, l *coordinator.Lease) { l.Answered(true) }, ""},
		{"released", func(_ *wired, l *coordinator.Lease) { l.Release() }, ""},
		{"registered after the release", func(w *wired, l *coordinator.Lease) {
			l.Release()
			l.RegisterOrphanCleanup([]byte("late"))
			reconnect(w)
		}, ""},
	} {
		bubble(t, tt.name, nil, func(t *testing.T, w *wired) {
			p := w.Must(t, placetest.NewPlacementRequest())
			p.Lease.RegisterOrphanCleanup([]byte("write it"))
			synctest.Wait() // the message is sent at once
			tt.life(w, p.Lease)
			later(link.Linger)
			w.die()
			later(2 * reconnectGrace)
			got := ""
			select {
			case got = <-w.orphans:
			default:
			}
			if got != tt.want || len(w.orphans) > 0 {
				t.Errorf("the coordinator ran %q, and %d more, want %q", got, len(w.orphans), tt.want)
			}
		})
	}
	t.Run("of one process", func(t *testing.T) {
		w := newWorld(t, "p prefill", "d decode")
		p := w.Must(t, placetest.NewPlacementRequest())
		p.Lease.RegisterOrphanCleanup([]byte("write it"))
		p.Lease.Release()
	})
}

// TestOrphansWhilePrefillComputesAreBounded: a worker registers clean-ups up to a limit, reconnects
// with all of them, and registers again when the earlier ones have ended.
func TestOrphansWhilePrefillComputesAreBounded(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		const each = maxEarly / 8
		var open []*coordinator.Lease
		register := func() {
			for range 10 {
				p := w.Must(t, placetest.NewPlacementRequest())
				p.Lease.RegisterOrphanCleanup(make([]byte, each))
				open = append(open, p.Lease)
			}
			later(link.Linger)
		}
		owed := func() (n int) {
			w.server.mu.Lock()
			defer w.server.mu.Unlock()
			for _, one := range w.server.workers {
				one.mu.Lock()
				for _, l := range one.leases {
					n += len(l.owed)
				}
				one.mu.Unlock()
			}
			return n
		}
		for round, end := range []func(*coordinator.Lease){
			(*coordinator.Lease).Release,
			func(l *coordinator.Lease) { l.Answered(true) },
			func(l *coordinator.Lease) { l.SetOrphanCleanup(nil); l.PrefillDone() },
		} {
			register()
			for _, when := range []string{"registered", "reconnected"} {
				if n := owed(); n != maxEarly || !w.client.Connected() {
					t.Errorf("round %d, %s: the coordinator has %d bytes, want %d", round, when, n, maxEarly)
				}
				w.client.Redial()
				later(time.Second)
			}
			for _, l := range open {
				end(l)
				l.Release()
			}
			open = nil
			later(2 * link.Linger)
			if n := owed() + int(w.client.early.Load()); n != 0 {
				t.Errorf("round %d: %d bytes remain", round, n)
			}
		}
		w.holds(t, 0)
	})
}

// TestStopAfterADeath: a coordinator that stops does not wait until a worker that died
// can no longer reconnect.
func TestStopAfterADeath(t *testing.T) {
	for _, tt := range []struct {
		name string
		host func(w *wired)
		want int // clean-ups
	}{
		{"of this host", func(*wired) {}, 1},
		{"of another host", func(w *wired) {
			w.pipes.move()
			w.client.Redial()
			later(time.Second)
		}, 0},
	} {
		bubble(t, tt.name, nil, func(t *testing.T, w *wired) {
			tt.host(w)
			p := w.Must(t, placetest.NewPlacementRequest())
			p.Lease.SetOrphanCleanup([]byte("free it"))
			p.Lease.PrefillDone()
			later(link.Linger)
			w.die()
			later(100 * time.Millisecond)
			began := time.Now()
			w.stopServing()
			if took := time.Since(began); took > 0 || len(w.orphans) != tt.want {
				t.Errorf("got %v and %d clean-ups, want 0s and %d", took, len(w.orphans), tt.want)
			}
		})
	}
}

// stepDown ends the coordinator's term, which does not wait for clean-ups.
func (w *wired) stepDown(t *testing.T) {
	began := time.Now()
	if w.server.StandBy(); time.Since(began) >= settling {
		t.Errorf("StandBy took %v", time.Since(began))
	}
}

// die makes the worker die: its connection ends, and the worker does not reconnect.
func (w *wired) die() {
	w.pipes.fall(true)
	w.pipes.last().cut()
}

// TestLeasesUnderFire: connections are cut while many place, move and release by
// two goroutines at once; in the end nothing is held anywhere.
func TestLeasesUnderFire(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "q prefill", "d decode two 2", "e decode")
	w.connect(t)
	w.SetDecider(placetest.Builtin(t, "auto", "power_of_two"))
	stop := make(chan struct{})
	var cutting, placing sync.WaitGroup
	cutting.Go(func() {
		rnd := rand.New(rand.NewPCG(7, 7))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rnd.IntN(5)) * time.Millisecond):
			}
			w.server.mu.Lock()
			for _, worker := range w.server.workers {
				worker.conn.Close(errors.New("cut"))
			}
			w.server.mu.Unlock()
			if rnd.IntN(3) == 0 {
				w.client.Redial()
			}
		}
	})
	for g := range 8 {
		placing.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(g)))
			for range 300 {
				a := placetest.NewPlacementRequest()
				p, err := w.client.Place(context.Background(), a)
				if err != nil {
					t.Error(err)
					return
				}
				if rnd.IntN(4) == 0 {
					a.Prefill, a.ID = p.Prefill, p.ID
					if q, err := w.client.Place(context.Background(), a); err == nil {
						p.Lease.Release()
						p = q
					}
				}
				if rnd.IntN(2) == 0 {
					p.Recycle()
				}
				var both sync.WaitGroup
				both.Go(p.Lease.PrefillDone)
				both.Go(func() { p.Lease.Answered(rnd.IntN(2) == 0) })
				both.Go(p.Lease.Release)
				p.Lease.Release()
				both.Wait()
			}
		})
	}
	placing.Wait()
	close(stop)
	cutting.Wait()
	w.connected(t)
	for range 10_000 { // neither side may have handled the last cut yet; a lease that remains is a failure
		if w.unused() {
			break
		}
		placetest.Pause(t)
	}
	w.Idle(t)
	if w.client.open != nil {
		t.Error("the worker stores leases that have ended")
	}
	if n := w.client.o.Fallback.(placetest.Uncounted).Open(); n != 0 {
		t.Errorf("the worker itself has %d leases", n)
	}
}
