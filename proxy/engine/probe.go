package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

const (
	// maxProbeAnswer bounds the answer to a probe, in bytes.
	maxProbeAnswer = 4 << 20
	// maxModels bounds the models of one engine. Each has a Pool in each snapshot.
	maxModels = 4096
	// maxFacts bounds the facts of one engine, in bytes of the JSON in which workers get
	// them: one message has the facts of all engines.
	maxFacts = 1 << 20
	// relearnEvery is the number of successful probes after which the facts of a ready
	// instance are read again: adapters come and go, and an engine may have been
	// replaced between two probes.
	relearnEvery = 15
	// drainPoll is how often the load of a draining instance is checked.
	drainPoll = 50 * time.Millisecond
)

// prober watches one instance: it probes it, changes its state, and removes it when it
// has drained. One goroutine owns it.
type prober struct {
	r               *Registry
	i               *Instance
	good            int       // successful probes in a row
	bad             int       // failed probes in a row
	fresh           int       // successful probes since the facts were read
	unanswered      int       // probes in a row without any answer
	unansweredSince time.Time // when the first probe of unanswered had ended
	lost            bool      // since the last successful probe, one failed otherwise than by a time-out
	lastProblem     string    // the problem that was logged last
	absent          []string  // paths of facts that the engine answered with 404; nil again when its process may be a new one
}

// watch probes i until it has left or ctx ends. No probe is in flight when it returns.
func (r *Registry) watch(ctx context.Context, i *Instance) {
	p := &prober{r: r, i: i}
	defer i.asks.CloseIdleConnections()
	evicting, stop := context.WithCancel(ctx)
	var leaving sync.WaitGroup
	leaving.Go(func() { r.evictCalls(evicting, i) })
	defer leaving.Wait()
	defer stop()
	if r.reports == nil && !i.IsRemote() {
		p.probeWhile(ctx)
	} else { // a mirror gets the states by Import
		if r.reports == nil {
			p.assumeReady()
		}
		select {
		case <-ctx.Done():
		case <-i.staying.Done():
		}
	}
	if ctx.Err() == nil {
		p.drain(ctx)
	}
}

// spreadFrom is the number of instances from which the probes of instances that came together
// spread over the interval, by a random pause after the first probe. Thousands of probes at the same
// time would take longer than their time-out. In a small fleet, probes at the same time show sooner
// which instance does not answer: see noteAnswer.
const spreadFrom = 64

// probeWhile probes at once and then every interval, sooner if the instance is suspect,
// until the instance drains or ctx ends.
func (p *prober) probeWhile(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(p.i.staying, stop)()
	late := time.AfterFunc(time.Duration(p.r.health.Load().Timeout), func() { p.r.looked(p.i) })
	defer late.Stop()
	for first := true; ctx.Err() == nil; first = false {
		h, began := p.r.health.Load(), time.Now()
		if p.probe(ctx, h); ctx.Err() == nil {
			p.r.looked(p.i)
		}
		pause := p.pause(h, began)
		if first && len(p.r.Snapshot().Instances) >= spreadFrom {
			pause = time.Duration(rand.Int64N(int64(pause) + 1))
		}
		next := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-next.C:
		case <-p.i.probeNow:
			if again := time.Duration(h.SuspectInterval); again > 0 {
				next.Reset(max(0, again-time.Since(began)))
			}
			select {
			case <-ctx.Done():
			case <-next.C:
			}
		}
		next.Stop()
	}
}

// assumeReady makes a remote ready. Probes would use up the requests that its operator
// allows, so only its circuit shows its health.
func (p *prober) assumeReady() {
	p.i.facts.Store(p.i.published())
	p.r.become(p.i, Ready)
}

// drain waits until nothing is in flight or the instance's time is up, and removes the
// instance.
func (p *prober) drain(ctx context.Context) {
	p.r.setUnresponsive(p.i, false) // it is not probed any more
	p.r.announce(p.i, Draining)
	limit := time.NewTimer(time.Duration(p.i.drainFor.Load()))
	defer limit.Stop()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for over := false; !over && !p.i.Idle(); {
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			p.r.log.Warn("engine removed with requests in flight", "engine", p.i.Spec.Name)
			over = true
		case <-poll.C:
		}
	}
	p.r.forget(p.i)
}

// probe makes one probe and applies its result.
func (p *prober) probe(ctx context.Context, h *config.Health) {
	began, othersAnswered := time.Now(), p.r.lastAnswered()
	epoch, err := p.health(ctx, h)
	if ctx.Err() != nil || errors.Is(err, errLate) || p.ownFault(err) {
		return
	}
	defer p.noteAnswer(h, began, othersAnswered, err) // runs after the state has changed
	if err != nil {
		p.failed(h, err)
		return
	}
	p.connAccepted()
	ended := p.i.Ended()
	p.r.setEnded(p.i, false)
	failedBefore := p.bad > 0
	p.good++
	if p.fresh++; p.i.relearn.Swap(false) {
		p.fresh, p.absent = relearnEvery, nil
	}
	switch p.i.probed() {
	case Unhealthy:
		if p.good < h.HealthyAfter && !ended {
			p.bad = 0
			return
		}
	case Ready:
		restarted := epoch != "" && epoch != p.i.Facts().Epoch
		if restarted {
			p.absent = nil
		} else if !failedBefore && p.fresh < relearnEvery {
			return
		}
	}
	if err := p.learn(ctx, h); err != nil {
		if ctx.Err() == nil && !errors.Is(err, errLate) && !p.ownFault(err) {
			p.failed(h, err)
		}
		return
	}
	p.bad, p.fresh, p.lost, p.lastProblem = 0, 0, false, ""
	p.syncClock(ctx, h)
}

// ownFault reports whether a probe failed because this host could not open a connection.
// Such a probe does not show the state of the engine.
func (p *prober) ownFault(err error) bool {
	if !upstream.IsLocal(err) {
		return false
	}
	if text := err.Error(); text != p.lastProblem {
		p.lastProblem = text
		p.r.log.Warn("engine not probed: this host cannot open a connection", "engine", p.i.Spec.Name, "error", err)
	}
	return true
}

// failed counts a failed probe. One refused connection shows that the engine's process
// has ended.
func (p *prober) failed(h *config.Health, err error) {
	p.good, p.absent = 0, nil
	p.bad++
	p.lost = p.lost || !timedOut(err)
	ended := IsRefused(err)
	p.r.setEnded(p.i, ended)
	if text := err.Error(); text != p.lastProblem {
		p.lastProblem = text
		p.r.log.Warn("probe failed", "engine", p.i.Spec.Name, "state", p.i.State().String(), "error", err)
	}
	if p.i.probed() == Ready && (p.bad >= h.UnhealthyAfter || ended) {
		p.r.become(p.i, Unhealthy)
	}
}

// health makes the health probe. epoch is the epoch of the engine's process in the
// answer, or "".
func (p *prober) health(ctx context.Context, h *config.Health) (epoch string, err error) {
	path, bootstrap := p.i.protocol.HealthPath(p.i.Role)
	if p.i.Spec.HealthPath != "" {
		path, bootstrap = p.i.Spec.HealthPath, false
	}
	base := p.i.Spec.URL
	if bootstrap {
		f := p.i.Facts()
		if p.i.Spec.BootstrapPort == 0 && p.i.probed() != Ready { // the facts contain the port, which may change after a restart
			if f, err = p.ask(ctx, h); err != nil {
				return "", err
			}
		}
		base = p.i.registry(f)
	}
	status, body, err := p.get(ctx, h, base, path)
	if err != nil {
		return "", err
	}
	if status/100 != 2 {
		return "", fmt.Errorf("probe engine: %s answered with status %d", path, status)
	}
	if r, ok := p.i.protocol.(RegistryProtocol); ok && r.RegistryProbed() {
		var f Facts
		err := p.askRegistry(ctx, h, &f)
		return f.Epoch, err
	}
	if !bootstrap && slices.Contains(p.i.protocol.FactPaths(p.i.Role), path) {
		var f Facts
		if err := p.i.protocol.ReadFacts(&f, path, status, body); err != nil {
			return "", err
		}
		return f.Epoch, nil
	}
	return "", nil
}

// learn reads the facts, publishes them and makes the instance ready. If a new process runs at the
// same address, all data about the old process is dropped.
func (p *prober) learn(ctx context.Context, h *config.Health) error {
	f, err := p.ask(ctx, h)
	if err != nil {
		return err
	}
	old, state := p.i.facts.Load(), p.i.probed()
	p.i.facts.Store(f)
	if old != nil && state != Down && restarted(old, f, state == Unhealthy && p.lost) {
		p.i.restarts.Add(1)
		p.absent = nil
		pairs := p.r.restarted(p.i)
		if _, keeps := p.i.protocol.(PortKeeper); keeps && p.i.registry(old) == p.i.registry(f) {
			p.r.doubt(p.i, pairs)
		}
	}
	signal(p.r.changed)
	if state != Ready {
		p.warn(f)
	}
	if state != Ready || old.key() != f.key() || !old.KVEvents.equal(&f.KVEvents) || !slices.Equal(old.Models, f.Models) {
		p.r.become(p.i, Ready)
		if apart := p.r.refusalNews(p.i); apart != "" {
			p.r.log.Warn("pairs refused: the engines exclude a transfer", "engine", p.i.Spec.Name, "with", apart)
		}
	}
	return nil
}

// restarted reports whether the facts f come from another process than old. For an
// engine without epoch, one that was away counts as new. An instance whose probes only
// timed out was not away: an overloaded machine answers late. A process that ends
// refuses connections until the next one listens, and engines take longer for that than
// a probe's interval.
func restarted(old, f *Facts, away bool) bool {
	if old.Epoch != "" && f.Epoch != "" {
		return old.Epoch != f.Epoch
	}
	was, is := old.key(), f.key()
	if was.pageSz == 0 || is.pageSz == 0 { // one of the two is not known
		was.pageSz = is.pageSz
	}
	if was.kvType == "" || is.kvType == "" {
		was.kvType = is.kvType
	}
	return away || was != is || old.KVEvents.moved(&f.KVEvents)
}

// timedOut reports whether a probe failed by a time-out.
func timedOut(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// doubt doubts the pairs of the former process of i, a prefill instance, whose decode instances
// may keep its ports.
func (r *Registry) doubt(i *Instance, former []*Pair) {
	var doubted []*Pair
	for _, pair := range former {
		if pair.Prefill.Instance == i {
			pair = r.Pair(pair.Prefill, pair.Decode)
			pair.doubt()
			doubted = append(doubted, pair)
		}
	}
	r.pairs.note(doubted...)
}

// restarted drops the knowledge about the instance's former process. It returns the pairs of that
// process.
func (r *Registry) restarted(i *Instance) (pairs []*Pair) {
	r.log.Info("engine has restarted", "engine", i.Spec.Name)
	r.forgetSleep(i)
	pairs = r.pairs.drop(i.ID)
	for rank := range i.Load {
		i.Load[rank].Forget()
		i.Media[rank].Forget()
	}
	for _, slot := range i.KV {
		r.o.Index.Clear(slot)
	}
	i.Breaker.Success()
	i.Client.CloseIdle()
	if r.o.OnRestart != nil {
		r.o.OnRestart(i)
	}
	return pairs
}

// ask requests the facts of the instance. Configured values take precedence.
func (p *prober) ask(ctx context.Context, h *config.Health) (*Facts, error) {
	f := p.i.published()
	for _, path := range p.i.protocol.FactPaths(p.i.Role) {
		status, body, noAnswer := p.getFacts(ctx, h, path)
		if noAnswer != nil {
			status, body = 0, nil
		}
		if old := p.i.facts.Load(); old != nil && (noAnswer != nil || status/100 == 5) { // its earlier answer stays valid
			f.PageSize, f.KVCacheType, f.KVEvents = old.PageSize, old.KVCacheType, old.KVEvents
		}
		if err := p.i.protocol.ReadFacts(f, path, status, body); err != nil {
			return nil, cmp.Or(noAnswer, err)
		}
	}
	if err := p.askRegistry(ctx, h, f); err != nil {
		return nil, err
	}
	f.Addresses = p.addresses(ctx, h, f)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if p.i.Spec.Wire != "" {
		f.Wire = p.i.Spec.Wire
	}
	if p.i.Spec.Model == "" && len(f.Models) == 0 {
		return nil, errors.New("learn facts: the engine names no model; set engine.model")
	}
	return f, f.fit()
}

// getFacts is get for a path of facts. It asks each process only once for a path that the process
// does not have: earlier releases lack some.
func (p *prober) getFacts(ctx context.Context, h *config.Health, path string) (status int, body []byte, err error) {
	if slices.Contains(p.absent, path) {
		return http.StatusNotFound, nil, nil
	}
	status, body, err = p.get(ctx, h, p.i.Spec.URL, path)
	if err == nil && status == http.StatusNotFound {
		p.absent = append(p.absent, path)
	}
	return status, body, err
}

// fit returns an error if the facts are too large for the fleet.
func (f *Facts) fit() error {
	if n := len(f.Models); n > maxModels {
		return fmt.Errorf("learn facts: the engine names %d models, more than %d", n, maxModels)
	}
	b, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("learn facts: %w", err)
	}
	if len(b) > maxFacts {
		return fmt.Errorf("learn facts: they have %d bytes, more than %d", len(b), maxFacts)
	}
	return nil
}

// askRegistry adds the facts in the instance's bootstrap registry to f, if there is
// one.
func (p *prober) askRegistry(ctx context.Context, h *config.Health, f *Facts) error {
	r, ok := p.i.protocol.(RegistryProtocol)
	if !ok {
		return nil
	}
	path := r.RegistryPath(p.i.Role)
	if path == "" {
		return nil
	}
	status, body, noAnswer := p.get(ctx, h, p.i.registry(f), path)
	if noAnswer != nil {
		status, body = 0, nil
		if old := p.i.facts.Load(); old != nil { // its earlier answer stays valid
			f.DPSize, f.TPSize, f.PPSize, f.CPSize = old.DPSize, old.TPSize, old.PPSize, old.CPSize
			f.PageSize, f.KVCacheType, f.FollowsRoom = old.PageSize, old.KVCacheType, old.FollowsRoom
		}
	}
	if err := r.ReadFacts(f, path, status, body); err != nil {
		return cmp.Or(noAnswer, err)
	}
	return nil
}

// registry returns the base URL of the instance's bootstrap server, by the facts f.
func (i *Instance) registry(f *Facts) string {
	host, port := i.bootstrap(f)
	return "http://" + net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
}

// warn logs facts that contradict the configuration.
func (p *prober) warn(f *Facts) {
	if f.DPSize > 0 && f.DPSize != len(p.i.Load) {
		p.r.log.Warn("engine has another number of ranks than configured",
			"engine", p.i.Spec.Name, "ranks", len(p.i.Load), "reported", f.DPSize)
	}
}

// get makes one GET within a probe's time-out and reads the answer.
func (p *prober) get(ctx context.Context, h *config.Health, base, path string) (status int, body []byte, err error) {
	limit, began := time.Duration(h.Timeout), time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var answer bytes.Buffer
	if status, err = p.i.get(ctx, base, path, &answer); late(limit, time.Since(began), err) {
		err = errLate
	} else if err != nil {
		err = noAnswerError{err}
	}
	return status, answer.Bytes(), err
}

// Get makes one GET of a path below the instance's URL, with the instance's key, on the
// connections of its probes. It appends the answer to buf, cut at 4 MiB. ctx bounds the
// whole call. An error contains nothing of the answer.
func (i *Instance) Get(ctx context.Context, path string, buf *bytes.Buffer) (status int, err error) {
	return i.get(ctx, i.Spec.URL, path, buf)
}

// Post is Get for a POST without a body.
func (i *Instance) Post(ctx context.Context, path string, buf *bytes.Buffer) (status int, err error) {
	return i.call(ctx, http.MethodPost, i.Spec.URL, path, buf)
}

func (i *Instance) get(ctx context.Context, base, path string, buf *bytes.Buffer) (status int, err error) {
	return i.call(ctx, http.MethodGet, base, path, buf)
}

func (i *Instance) call(ctx context.Context, method, base, path string, buf *bytes.Buffer) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(base, "/")+path, nil)
	if err != nil {
		return 0, fmt.Errorf("probe engine: %w", bare(err))
	}
	if i.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+i.APIKey)
	}
	// Compressing its metrics would cost the engine's process time.
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := i.asks.Do(req)
	if err != nil {
		return 0, fmt.Errorf("probe engine: %s: %w", path, bare(err))
	}
	defer resp.Body.Close()
	if _, err := buf.ReadFrom(io.LimitReader(resp.Body, maxProbeAnswer)); err != nil {
		return 0, fmt.Errorf("probe engine: %s: %w", path, bare(err))
	}
	return resp.StatusCode, nil
}

// bare removes the URL, which may contain credentials, from an error.
func bare(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return ue.Err
	}
	return err
}
