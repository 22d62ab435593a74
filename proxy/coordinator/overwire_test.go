package coordinator_test

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// world is a World. In the subtests of TestOverTheWire it is behind a Unix socket.
type world struct{ *placetest.World }

func newWorld(t testing.TB, specs ...string) *world {
	t.Helper()
	w := &world{placetest.NewWorld(t, specs...)}
	if strings.HasPrefix(t.Name(), overTheWire) {
		w.connect(t)
	}
	return w
}

// connect makes the tests call a Client over a socket.
func (w *world) connect(t testing.TB) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := disaggid.New(1, 3)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	here := coordinator.NewLocal(w.Reg, placetest.Stub{}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{}, ids, w.Counts)
	server := fleet.NewServer(fleet.ServerOptions{Local: w.Local, Log: placetest.Quiet(), Epoch: 1})
	client := fleet.NewClient(fleet.ClientOptions{
		Dial:     func(ctx context.Context) (net.Conn, error) { return certs.Dial(ctx, "unix:"+path) },
		Fallback: placetest.Uncounted{Local: here},
		Mirror:   placetest.Same{Reg: w.Reg}, Log: placetest.Quiet(), Observer: w.Counts, Patience: 1 << 40,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	running.Go(func() { client.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	for !client.Connected() {
		placetest.Pause(t)
	}
	w.Remote = client
}

// overTheWire is the test whose subtests place through a Client and a Server.
const overTheWire = "TestOverTheWire/"

// TestOverTheWire runs tests of a Local over a real socket.
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
		"SequencesAreForgotten":          TestSequencesAreForgotten,
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
		"NextPlacementFindsTheBlocks":    TestNextPlacementFindsTheBlocks,
		"QueuedTokensAreThoseNotHeld":    TestQueuedTokensAreThoseNotHeld,
		"ConversationsComeHome":          TestConversationsComeHome,
		"Cut":                            TestCut,
		"Computed":                       TestComputed,
		"Costs":                          TestCosts,
		"Media":                          TestMedia,
	} {
		t.Run(name, test)
	}
}
