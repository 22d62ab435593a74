package election

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/kube"
)

// Lease is the Lease (coordination.k8s.io/v1) of Kubernetes in which coordinators elect their
// leader. The record of the leader is an annotation of the Lease.
type Lease struct {
	Client          *kube.Client
	Namespace, Name string
}

// leaderAnnotation is the annotation of the Lease with the record of the leader.
const leaderAnnotation = "pdproxy/leader"

// renewals is how often a leader renews its Lease, and a candidate reads the Lease, within TTL.
const renewals = 5

// LeasePath is the path of the Leases of a namespace.
func LeasePath(namespace string) string {
	return "/apis/coordination.k8s.io/v1/namespaces/" + url.PathEscape(namespace) + "/leases"
}

// path returns the path of the Lease.
func (l *Lease) path() string { return LeasePath(l.Namespace) + "/" + url.PathEscape(l.Name) }

// leaseChange is a change of a Lease. A nil member stays as it is.
type leaseChange struct {
	APIVersion string        `json:"apiVersion"`
	Kind       string        `json:"kind"`
	Metadata   leaseMetadata `json:"metadata"`
	Spec       leaseSpec     `json:"spec"`
}

type leaseMetadata struct {
	Name            string            `json:"name"`
	ResourceVersion string            `json:"resourceVersion,omitempty"` // the version that is changed; "": a new Lease
	Annotations     map[string]string `json:"annotations,omitempty"`
}

type leaseSpec struct {
	Holder      *string `json:"holderIdentity"` // nil: nobody
	Seconds     int     `json:"leaseDurationSeconds"`
	Acquired    string  `json:"acquireTime,omitempty"`
	Renewed     string  `json:"renewTime"`
	Transitions int     `json:"leaseTransitions,omitempty"`
}

// runLease is Run of an election by a Lease.
func (e *Election) runLease(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var t trouble
	free := make(chan struct{}, 1) // nobody holds the Lease
	var w *kube.Watch
	w = kube.NewWatch(e.o.Lease.Client, kube.Selected{
		Paths: []string{LeasePath(e.o.Lease.Namespace)}, Fields: "metadata.name=" + e.o.Lease.Name,
	}, func(err error) { t.note(e, err) }, func() {
		o := w.Object(e.o.Lease.Namespace, e.o.Lease.Name)
		if o != nil {
			e.takeLease(o)
		}
		if o == nil || o.Spec.HolderIdentity == "" {
			select {
			case free <- struct{}{}:
			default:
			}
		}
	})
	if e.o.Address != "" {
		wg.Go(func() { e.campaignForLease(ctx, free) })
	}
	w.Run(ctx)
}

// takeLease handles the record in a Lease. takeLease ignores an unreadable record, which the next
// leader replaces.
func (e *Election) takeLease(o *kube.Object) (l Leader) {
	text := o.Metadata.Annotations[leaderAnnotation]
	if text == "" {
		return l
	}
	l, err := parse([]byte(text))
	if err != nil {
		e.o.Log.Warn("the leader's record cannot be decoded", "lease", o.Key(), "error", err)
		return l
	}
	e.saw(l)
	return l
}

// campaignForLease waits until nobody holds the Lease, and leads, one term after another.
//
// A holder that has not renewed the Lease for TTL no longer holds it. This time begins when this
// process has read the version of the Lease for the first time: the clocks of hosts may differ. It
// begins again after the API server was away, because the leader could not renew its Lease either.
func (e *Election) campaignForLease(ctx context.Context, free <-chan struct{}) {
	defer e.Resign() // a process that is no candidate does not lead
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stands, cancel)()
	var version string // of the Lease; "": not read since the API server was away
	var since time.Time
	for ctx.Err() == nil {
		o, err := e.readLease(ctx)
		switch {
		case err == nil && version != o.Metadata.ResourceVersion:
			version, since = o.Metadata.ResourceVersion, time.Now()
		case kube.Is(err, http.StatusNotFound):
			o, err = &kube.Object{}, nil
		case err != nil:
			version = "" // the watch logs why
		}
		if err == nil && (o.Spec.HolderIdentity == "" || o.Spec.HolderIdentity == e.holder() || version != "" && time.Since(since) >= e.o.TTL) {
			if held := e.acquire(ctx, o); held != nil {
				e.reignByLease(ctx, held)
				version = ""
			}
		}
		waitFor(ctx, free, e.o.TTL/renewals)
	}
}

// waitFor waits for d, until something arrives, or until ctx ends.
func waitFor(ctx context.Context, arrives <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-arrives:
	case <-timer.C:
	}
}

// holder returns the identity of this process in the Lease.
func (e *Election) holder() string { return e.o.Node + "_" + strconv.FormatUint(e.id, 16) }

// acquire makes this process the holder of the Lease whose content is o; without a version there
// is no Lease. It returns the Lease after that, or nil if another candidate was faster or the API
// server refuses.
func (e *Election) acquire(ctx context.Context, o *kube.Object) *kube.Object {
	own := e.next(e.takeLease(o), time.Now())
	record, err := json.Marshal(own)
	if err != nil {
		e.o.Log.Error("the record of this coordinator cannot be written", "error", err)
		return nil
	}
	c := e.change(o, e.holder())
	c.Spec.Acquired, c.Spec.Transitions = c.Spec.Renewed, o.Spec.LeaseTransitions+1
	c.Metadata.Annotations = map[string]string{leaderAnnotation: string(record)}
	held, err := e.write(ctx, c)
	if err != nil {
		if ctx.Err() == nil && !kube.Is(err, http.StatusConflict) {
			e.o.Log.Warn("the Lease of the election cannot be acquired", "lease", e.o.Lease.Namespace+"/"+e.o.Lease.Name, "error", err)
		}
		return nil
	}
	if !e.lead(own) { // this process has resigned, or has seen a higher epoch
		e.release(ctx, held)
		return nil
	}
	return held
}

// change returns the change of the Lease o that makes or keeps holder the holder; "" is nobody.
func (e *Election) change(o *kube.Object, holder string) *leaseChange {
	c := &leaseChange{
		APIVersion: "coordination.k8s.io/v1", Kind: "Lease",
		Metadata: leaseMetadata{Name: e.o.Lease.Name, ResourceVersion: o.Metadata.ResourceVersion},
		Spec:     leaseSpec{Seconds: seconds(e.o.TTL), Renewed: time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")},
	}
	if holder != "" {
		c.Spec.Holder = &holder
	}
	return c
}

// readLease reads the Lease.
func (e *Election) readLease(ctx context.Context) (o *kube.Object, err error) {
	return e.inTime(ctx, func(ctx context.Context) (*kube.Object, error) {
		return e.o.Lease.Client.Read(ctx, e.o.Lease.path())
	})
}

// write makes the Lease, or changes the version that c names.
func (e *Election) write(ctx context.Context, c *leaseChange) (*kube.Object, error) {
	return e.inTime(ctx, func(ctx context.Context) (*kube.Object, error) { return e.writeLease(ctx, c) })
}

// inTime calls do with a limit that leaves time for a second try within TTL. A connection on which
// the API server does not answer is not used again.
func (e *Election) inTime(ctx context.Context, do func(context.Context) (*kube.Object, error)) (*kube.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, e.o.TTL/3)
	defer cancel()
	o, err := do(ctx)
	if ctx.Err() == context.DeadlineExceeded {
		e.o.Lease.Client.Redial()
	}
	return o, err
}

func (e *Election) writeLease(ctx context.Context, c *leaseChange) (*kube.Object, error) {
	if c.Metadata.ResourceVersion == "" {
		return e.o.Lease.Client.Write(ctx, http.MethodPost, LeasePath(e.o.Lease.Namespace), c)
	}
	return e.o.Lease.Client.Write(ctx, http.MethodPatch, e.o.Lease.path(), c)
}

// reignByLease renews the Lease held until ctx ends, another coordinator leads, or another process
// has changed the Lease. While the API server is away the process goes on leading.
func (e *Election) reignByLease(ctx context.Context, held *kube.Object) {
	for {
		s, changed := e.Standing()
		if s.Leads {
			waitFor(ctx, changed, e.o.TTL/renewals)
			s, _ = e.Standing()
		}
		if ctx.Err() != nil || e.stands.Err() != nil {
			e.release(ctx, held)
			return
		}
		if !s.Leads {
			return
		}
		next, err := e.write(ctx, e.change(held, e.holder()))
		if kube.Is(err, http.StatusConflict) || kube.Is(err, http.StatusNotFound) {
			if next, err = e.readLease(ctx); kube.Is(err, http.StatusNotFound) {
				return
			}
			if err == nil {
				if e.takeLease(next); next.Spec.HolderIdentity != e.holder() {
					return
				}
			}
		}
		if err == nil {
			held = next
		}
	}
}

// release gives up the Lease held, so that the next coordinator leads at once. If release fails,
// the Lease runs out.
func (e *Election) release(ctx context.Context, held *kube.Object) {
	if _, err := e.write(context.WithoutCancel(ctx), e.change(held, "")); err != nil && !kube.Is(err, http.StatusConflict) {
		e.o.Log.Warn("the Lease of the election cannot be released; the next coordinator leads when it has run out", "error", err)
	}
}
