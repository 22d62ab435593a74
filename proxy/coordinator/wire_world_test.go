package coordinator

import (
	"context"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// overTheWire is the test whose subtests place through a Client and a Server.
const overTheWire = "TestOverTheWire/"

// TestOverTheWire runs what holds of a Local over a real socket.
func TestOverTheWire(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"PlacePair":                      TestPlacePair,
		"PlaceAggregated":                TestPlaceAggregated,
		"PlaceErrors":                    TestPlaceErrors,
		"PlaceOnlyModel":                 TestPlaceOnlyModel,
		"PlanAnswer":                     TestPlanAnswer,
		"PlaceSame":                      TestPlaceSame,
		"PlaceScores":                    TestPlaceScores,
		"Plan":                           TestPlan,
		"PlanFacts":                      TestPlanFacts,
		"PlaceVerifies":                  TestPlaceVerifies,
		"PlaceVerifiesAggregated":        TestPlaceVerifiesAggregated,
		"PlaceWithoutAnyAnswer":          TestPlaceWithoutAnyAnswer,
		"Mint":                           TestMint,
		"FallbacksOfAFailedPlace":        TestFallbacksOfAFailedPlace,
		"SetDecider":                     TestSetDecider,
		"RemovedInstanceFreesItsLoad":    TestRemovedInstanceFreesItsLoad,
		"PairsOnRequest":                 TestPairsOnRequest,
		"PlaceOnly":                      TestPlaceOnly,
		"TurnsAreForgotten":              TestTurnsAreForgotten,
		"Within":                         TestWithin,
		"WithinFixed":                    TestWithinFixed,
		"Two":                            TestTwo,
		"Offered":                        TestOffered,
		"OfferedAggregated":              TestOfferedAggregated,
		"PairCircuit":                    TestPairCircuit,
		"Fixed":                          TestFixed,
		"FixedVerifies":                  TestFixedVerifies,
		"FixedWhere":                     TestFixedWhere,
		"FixedGone":                      TestFixedGone,
		"Hammer":                         TestHammer,
		"TablesKeepThePromise":           TestTablesKeepThePromise,
		"Spread":                         TestSpread,
		"PlaceAllocatesOnlyThePlacement": TestPlaceAllocatesOnlyThePlacement,
		"BlocksOfARequestAreExpected":    TestBlocksOfARequestAreExpected,
		"QueuedTokensAreThoseNotHeld":    TestQueuedTokensAreThoseNotHeld,
		"ConversationsComeHome":          TestConversationsComeHome,
		"Cut":                            TestCut,
		"Computed":                       TestComputed,
		"Costs":                          TestCosts,
	} {
		t.Run(name, test)
	}
}

// quiet is a log that nobody reads.
func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// same is the Numbers of a worker that has the coordinator's own instances.
type same struct{ reg *engine.Registry }

func (same) Number(i *engine.Instance) (uint32, bool) { return i.ID, true }
func (s same) Instance(n uint32) *engine.Instance {
	for _, i := range s.reg.Snapshot().Instances {
		if i.ID == n {
			return i
		}
	}
	return nil
}

// connect puts a socket between the tests and the world's Local.
func (w *world) connect(t testing.TB) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	w.server = NewServer(ServerOptions{Local: w.Local, Log: quiet(), Epoch: 1})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := w.server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	w.client = w.newClient(t, "unix", path)
	running.Go(func() { w.client.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	w.connected(t)
}

// newClient returns a client of the server at an address.
func (w *world) newClient(t testing.TB, network, address string) *Client {
	t.Helper()
	mint, err := disaggid.New(1, 3)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if network == "unix" {
		address = "unix:" + address
	}
	c := NewClient(ClientOptions{
		Dial:     func(ctx context.Context) (net.Conn, error) { return certs.Dial(ctx, address) },
		Fallback: NewLocal(w.reg, stub{}, builtin(t, "auto", "least_load"), State{}, mint, w.counts),
		Mirror:   same{w.reg}, Log: quiet(), Observer: w.counts, Patience: patience,
	})
	c.bare = true
	return c
}

// patience of tests: nobody is late unless a test has him be.
const patience = 1 << 40

// connected waits until the client is.
func (w *world) connected(t testing.TB) {
	for !w.client.Connected() {
		pause(t)
	}
}

// pause lets others work, while a test waits for what it does not hear of.
func pause(t testing.TB) {
	t.Helper()
	select {
	case <-t.Context().Done():
		t.Fatal("waited in vain")
	case <-time.After(time.Millisecond):
	}
}

// Place places by the coordinator that the test is about.
func (w *world) Place(ctx context.Context, a *Ask) (*Placement, error) {
	if w.client != nil {
		return w.client.Place(ctx, a)
	}
	return w.Local.Place(ctx, a)
}

// arrived returns when the coordinator has heard all that was sent.
func (w *world) arrived() {
	if w.client != nil {
		w.client.Place(context.Background(), &Ask{Model: "nobody serves this"})
	}
}
