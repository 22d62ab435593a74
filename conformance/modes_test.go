package conformance

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// modeConnectors are the connectors that represent all others in fleets: one
// for each order of the legs, and one of each engine.
const modeConnectors = enginesim.ConnectorVLLMNixl + "," + enginesim.ConnectorSGLang + "," + enginesim.ConnectorTRTLLM

// scenario is a test of this package.
type scenario struct {
	name string
	run  func(*testing.T)
}

// The scenarios that TestModes... run with workers on the coordinator's host. `make modes` runs every
// test. They are several tests, because each test runs in one process of make processes.
var fleetAnswers = []scenario{
	{"answers", TestAnswersEqualOneEngine},
	{"apis", TestAPIsEqualOneEngine},
	{"models", TestModels},
	{"Codex", TestCodex},
	{"Claude Code", TestClaudeCode},
	{"whole routes", TestWholeRoutes},
	{"media", TestMedia},
	{"engine routes", TestEngineRoutes},
	{"stored responses", TestStoredResponses},
	{"background responses", TestBackgroundResponses},
	{"unknown responses", TestUnknownResponses},
	{"web pages", TestWebPages},
}

var fleetFailures = []scenario{
	{"client leaves prefill", TestClientLeavesBeforePrefillAnswered},
	{"client leaves between the legs", TestClientLeavesBetweenTheLegs},
	{"client leaves decode", TestClientLeavesWhileDecodeStreams},
	{"decode refuses", TestDecodeRefuses},
	{"leg fails and is retried", TestLegFailsBeforeFirstByteAndIsRetried},
	{"prefill times out", TestPrefillTimesOut},
	{"stream is idle", TestStreamIsIdleTooLong},
	{"prefills that wait", TestWaitingPrefillsStop},
	{"overload", TestOverload},
	{"retry budget", TestRetryBudgetIsGlobal},
	{"circuit", TestBadPrefillAnswersOpenTheCircuit},
	{"broken pair", TestRetryLeavesBothEnginesOfABrokenPair},
}

var fleetEngines = []scenario{
	{"engine stops", TestEngineStopped},
	{"decode dies mid-stream", TestDecodeDiesMidStream},
	{"decode dies inside an answer", TestDecodeDiesInsideAUnaryAnswer},
	{"streams go on", TestContinuedAtRandom},
	{"rolling update", TestRollingUpdate},
	{"no target", TestNoTargetForAPhase},
	{"engine restarts", TestEngineRestarts},
	{"dead decode", TestNoPrefillForADeadDecode},
	{"failing decode", TestNoPrefillForAFailingDecode},
	{"decode restarts at once", TestMooncakeDecodeRestartsAtOnce},
}

var fleetOperation = []scenario{
	{"drain", TestDrainTellsClientsInEveryPhase},
	{"reload", TestReloadDropsNoStream},
	{"refused reload", TestReloadRefusedChangesNothing},
	{"engines by admin", TestEnginesByAdmin},
	{"keys", TestProxyKeysReachNoEngine},
	{"key of the clean-up", TestCleanupCarriesTheKeyOfWhoIsCalled},
	{"limit of a client", TestClientCapCountsTheQueue},
	{"full queue", TestFullQueueLetsAHigherClassIn},
	{"names of models", TestModelNames},
	{"fallback of a model", TestFallbackModel},
	{"fallback to a remote", TestRemote},
	{"sleeping engines", TestSleepingEngines},
	{"requests wake engines", TestRequestsWakeEngines},
	{"wakes that fail", TestWakesThatFail},
	{"idle engines sleep", TestIdleEnginesSleep},
}

var fleetRouting = []scenario{
	{"routing by blocks", TestRequestsGoWhereTheirBlocksAre},
	{"routing after a restart", TestARestartedEngineHoldsNothing},
	{"short turns", TestShortTurnsGoHome},
	{"distrust", TestTroubleIsNamed},
	{"refused pair", TestRefusedPair},
	{"stale pair", TestStalePair},
	{"zones", TestSameZone},
	{"batches", TestBatchesMeetOneByOne},
	{"encode", TestEncodePrefillDecode},
	{"generation first", TestGenerationIsSentFirst},
	{"conditional", TestTRTLLMConditional},
	{"times", TestTRTLLMPerfMetrics},
	{"foreign workers", TestTRTLLMFleetWorkers},
	{"registry", TestEnginesFoundByTheirRegistry},
	{"fields of clients", TestNoPDFieldReachesAnEngine},
	{"turns", TestTurnIsPulled},
	{"turns of many conversations", TestTurnsOfManyConversations},
	{"sub-agents start at the parent", TestSubAgentsStartAtTheParent},
	{"turn of a chat", TestTurnOfAChat},
	{"turn that is rewritten", TestTurnThatIsRewritten},
	{"turn whose client leaves", TestTurnWhoseClientLeaves},
	{"turn whose prefill dies", TestTurnWhosePrefillDies},
	{"turn that comes too late", TestTurnComesTooLate},
}

// onHosts are the scenarios that TestModesHosts runs with workers on other hosts.
// Only their connection differs.
var onHosts = []scenario{
	{"answers", TestAnswersEqualOneEngine},
	{"client leaves between the legs", TestClientLeavesBetweenTheLegs},
	{"streams go on", TestContinuedAtRandom},
	{"reload", TestReloadDropsNoStream},
	{"routing by blocks", TestRequestsGoWhereTheirBlocksAre},
}

// TestModesAnswers: a fleet answers as one process does.
func TestModesAnswers(t *testing.T) { inMode(t, modeFleet, fleetAnswers) }

// TestModesFailures: a fleet retries, counts and cleans up as one process does.
func TestModesFailures(t *testing.T) { inMode(t, modeFleet, fleetFailures) }

// TestModesEngines: a fleet leaves engines that stop, die or restart as one process does.
func TestModesEngines(t *testing.T) { inMode(t, modeFleet, fleetEngines) }

// TestModesOperation: a fleet drains, reloads and knows names and keys as one process does.
func TestModesOperation(t *testing.T) { inMode(t, modeFleet, fleetOperation) }

// TestModesRouting: a fleet places as one process does.
func TestModesRouting(t *testing.T) { inMode(t, modeFleet, fleetRouting) }

// TestModesHosts: workers on other hosts do what those on the coordinator's host do.
func TestModesHosts(t *testing.T) { inMode(t, modeHosts, onHosts) }

// inMode runs scenarios in one mode.
func inMode(t *testing.T, mode string, scenarios []scenario) {
	if os.Getenv(modeVar) != "" {
		return // all tests of the package run in one mode
	}
	t.Setenv(modeVar, mode)
	t.Setenv(connectorsVar, modeConnectors)
	for _, s := range scenarios {
		t.Run(s.name, s.run)
	}
}

// eachFleet runs a test for fleets of both kinds and one connector of each engine.
func eachFleet(t *testing.T, run func(t *testing.T, connector string)) {
	for _, m := range []string{modeFleet, modeHosts} {
		t.Run(m, func(t *testing.T) {
			t.Setenv(modeVar, m)
			t.Setenv(connectorsVar, modeConnectors)
			eachConnector(t, run)
		})
	}
}

// strike kills a process during its work.
func (p *process) strike() {
	p.t.Helper()
	cfg := p.cfg
	cfg.Server.DrainTimeout = config.Duration(time.Nanosecond)
	if err := p.Reload(&cfg); err != nil {
		p.t.Fatal(err)
	}
	p.stop()
}

// books returns the number of leases of the coordinator.
func (f *fleet) books() float64 { return f.metric("pdproxy_leases_open") }

// through posts a request through one worker.
func (f *fleet) through(w *process, body string) answer {
	g := *f
	g.client = w.admin.Client // a client that uses one entry only
	return g.post(context.Background(), w.URL(), chatPath, body)
}

// TestWorkerKilled: a worker is killed with requests in every phase. Nothing of them remains on
// engines or in the coordinator. The other worker's requests continue, and a successor serves.
func TestWorkerKilled(t *testing.T) {
	eachFleet(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 50_000)})
		victim, other := f.workers[1], f.workers[0]
		kept := chat("kept", 700, true)
		var wg sync.WaitGroup
		whole := make(chan answer, 1)
		go func() { whole <- f.through(other, kept) }()
		for n := range 3 {
			wg.Go(func() { f.through(victim, chat(fmt.Sprint("streams ", n), 4000, true)) })
		}
		f.eventually("they stream", func() bool {
			return f.books() == 4 && f.decode[0].State().RequestsRunning+f.decode[1].State().RequestsRunning == 4
		})
		for _, d := range f.decode { // requests from now on stay between the legs
			d.SetFault("", 0, "head")
		}
		for n := range 3 {
			wg.Go(func() { f.through(victim, chat(fmt.Sprint(n, " waits ", long), 20, n > 0)) })
		}
		f.eventually("blocks wait for decode", func() bool {
			pinned := 0
			for _, e := range append(f.prefill, f.decode...) {
				s := e.State()
				pinned += s.BlocksPinned + s.RequestsWaiting
			}
			return f.books() == 7 && pinned > 0
		})
		victim.strike()
		f.workers = f.workers[:1]
		for _, d := range f.decode { // until now no stream may have ended
			d.SetFault("", 0, "")
			d.SetDecodeUsPerToken(3000)
		}
		_ = victim.end() // its error counts the cut requests
		f.eventually("its leases are gone", func() bool { return f.books() <= 1 })
		body := chat("through the other one", 8, true)
		f.right(f.through(other, body), chatPath, body)
		f.right(<-whole, chatPath, kept)
		wg.Wait()
		f.settled()

		f.workers = append(f.workers, f.startWorker(1))
		f.awaitWorkers()
		f.right(f.through(f.workers[1], body), chatPath, body)
		for _, e := range f.engines() {
			if n := e.State().LeasesExpired; n != 0 && connector != enginesim.ConnectorTRTLLM { // the proxy cannot send these engines a release
				t.Errorf("%s freed %d blocks by its own time-out", e.Addr(), n)
			}
		}
	})
}

// TestCoordinatorKilled: without the coordinator the workers' requests continue in every phase,
// also new ones. The next coordinator has the leases of all open requests, and in the end nothing
// remains.
func TestCoordinatorKilled(t *testing.T) {
	eachFleet(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 50_000), config: func(c *config.Config) {
			c.Timeouts.FirstByte = config.Duration(3 * time.Second)
		}})
		for _, w := range f.workers {
			f.eventually("the worker could do without its coordinator", w.healthy)
		}
		bodies := make(map[string]*http.Response)
		open := func(when string) {
			for n := range 2 * workers { // through each worker in turn
				body := chat(fmt.Sprintf("%s %d %s", when, n, long), 2000, true)
				bodies[body] = f.open(context.Background(), body)
			}
		}
		open("before")
		for _, d := range f.decode {
			d.SetFault("", 0, "head")
		}
		between := chat("between the legs "+long, 8, true)
		got := make(chan answer, 1)
		go func() { got <- f.try(chatPath, between) }()
		f.eventually("the coordinator has all leases", func() bool { return f.books() == 2*workers+1 })
		f.front.strike()
		_ = f.front.end() // its error counts the cut requests
		for _, d := range f.decode {
			d.SetFault("", 0, "")
		}
		open("without")
		body := chat("unary without", 8, false)
		f.right(f.try(chatPath, body), chatPath, body)

		f.startCoordinator()
		f.eventually("the coordinator has all open leases", func() bool { return f.books() >= 4*workers }) // a request that hangs is retried
		f.waitReady()
		f.right(f.try(chatPath, body), chatPath, body)
		for _, d := range f.decode { // until now no stream may have ended
			d.SetDecodeUsPerToken(100)
		}
		for body, resp := range bodies {
			f.right(readRest(resp), chatPath, body)
		}
		f.right(<-got, chatPath, between) // from a decode engine other than the one that hung
		alone := 0.0
		for _, w := range f.workers {
			n, err := w.admin.Metric("pdproxy_fallbacks_total", `what="place"`, `reason="coordinator"`)
			if err != nil {
				t.Fatal(err)
			}
			alone += n
		}
		if alone < 2*workers {
			t.Errorf("%v requests were placed without a coordinator, of %d at least", alone, 2*workers)
		}
	})
}
