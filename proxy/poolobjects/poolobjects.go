// Package poolobjects follows the objects of one InferencePool of the Gateway API Inference
// Extension: InferenceObjectives give requests priorities, and InferenceModelRewrites rename their
// models. If the configuration says so, the package writes the status of these objects and of the
// pool.
//
// Sources: llm-d-router apix/v1alpha2 and pkg/epp/datastore; gateway-api-inference-extension
// api/v1/inferencepool_types.go.
//
// The decisions behind this package are in docs/design/gateway.md.
package poolobjects

import (
	"cmp"
	"context"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/models"
)

// Kinds of objects, as in their paths and in metrics.
const (
	kindObjective = "InferenceObjective"
	kindRewrite   = "InferenceModelRewrite"
)

// poolGroup is the API group of InferencePool.
const poolGroup = "inference.networking.k8s.io"

// groups are the API groups of the objects. llm-d has moved them from the second to the first; as
// in llm-d, the second counts only if the server does not have the first (llm-d-router,
// pkg/epp/server/controller_config.go).
var groups = [...]string{"llm-d.ai", "inference.networking.x-k8s.io"}

// Objects are the valid objects of the pool. They are immutable.
type Objects struct {
	Priorities map[string]int   // of InferenceObjectives, by name
	Rewrites   []models.Rewrite // in order of precedence
}

// Options configures a Follower.
type Options struct {
	Config *config.Config // whose epp.pool names the pool
	// Apply gets the objects at first and after each change.
	Apply func(*Objects)
	// Count gets the numbers of valid and invalid objects of a kind after each change.
	Count func(kind string, valid, invalid int)
	// Writes reports whether this process writes status.
	Writes func() bool
	Log    *slog.Logger
}

// Follower follows the objects of a pool.
type Follower struct {
	o          Options
	client     *kube.Client
	namespace  string
	pool       string
	objectives *kube.Watch
	rewrites   *kube.Watch
	pools      *kube.Watch       // nil: no status is written
	changes    chan struct{}     // has room for one: objects have changed since the last look
	logged     map[string]string // the present problems of objects; used by Run only
	status     statusWriter      // used by Run only
}

// New returns a follower of the pool of the configuration. It opens nothing but files. The error is
// a config.Problems.
func New(o Options) (*Follower, error) {
	client, err := kube.Open(o.Config.Discovery.Kubernetes)
	if err != nil {
		return nil, err
	}
	return newOver(client, o)
}

// newOver returns a follower that uses client.
func newOver(client *kube.Client, o Options) (*Follower, error) {
	pool, namespace, _ := strings.Cut(o.Config.EPP.Pool, ".")
	if namespace = cmp.Or(namespace, client.Namespace); namespace == "" {
		return nil, config.Problems{o.Config.Problem("epp.pool", "needs POOL.NAMESPACE, or discovery.kubernetes.namespace")}
	}
	f := &Follower{o: o, client: client, pool: pool, namespace: namespace, changes: make(chan struct{}, 1), logged: map[string]string{}}
	f.objectives = f.watch("inferenceobjectives", groups[:]...)
	f.rewrites = f.watch("inferencemodelrewrites", groups[:]...)
	if o.Config.EPP.Status {
		f.pools = f.watch("inferencepools", poolGroup)
		f.pools.Fields = "metadata.name=" + pool
		f.status = newStatusWriter(client, o.Log)
	}
	return f, nil
}

// watch returns a watch of a resource in the namespace of the pool. The first of the API groups
// that the server has counts.
func (f *Follower) watch(resource string, groups ...string) *kube.Watch {
	var paths []string
	for _, group := range groups {
		version := "v1alpha2"
		if group == poolGroup {
			version = "v1"
		}
		paths = append(paths, "/apis/"+group+"/"+version+"/namespaces/"+url.PathEscape(f.namespace)+"/"+resource)
	}
	last := ""
	note := func(err error) {
		switch {
		case err == nil && last != "":
			f.o.Log.Info("the objects of the InferencePool are watched again", "resource", resource)
			last = ""
		case err != nil && err.Error() != last:
			last = err.Error()
			f.o.Log.Warn("the objects of the InferencePool cannot be watched; the known objects stay in force", "resource", resource, "error", err)
		}
	}
	return kube.NewWatch(f.client, kube.Selected{Paths: paths}, note, func() {
		select {
		case f.changes <- struct{}{}:
		default:
		}
	})
}

// statusAgain is the time after which status that could not be written is written again.
const statusAgain = 10 * time.Second

// Run follows the objects until ctx ends. While the API server is away, the last objects stay.
func (f *Follower) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, w := range []*kube.Watch{f.objectives, f.rewrites, f.pools} {
		if w != nil {
			wg.Go(func() { w.Run(ctx) })
		}
	}
	tick := time.NewTicker(statusAgain)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f.look(ctx, false)
		case <-f.changes:
			f.look(ctx, true)
		}
	}
}

// look applies the present objects if they have changed, and writes their status. Before all listings
// have arrived, look does nothing.
func (f *Follower) look(ctx context.Context, changed bool) {
	objectives, listed := f.objectives.Now()
	rewrites, also := f.rewrites.Now()
	if !listed || !also {
		return
	}
	problems := map[*kube.Object]error{}
	objectives, rewrites = f.ofPool(objectives), f.ofPool(rewrites)
	valid := &Objects{Priorities: prioritiesOf(objectives, problems), Rewrites: rewritesOf(rewrites, problems)}
	if changed {
		f.o.Apply(valid)
		f.report(kindObjective, objectives, problems)
		f.report(kindRewrite, rewrites, problems)
	}
	if f.pools == nil || !f.o.Writes() {
		return
	}
	for _, o := range objectives {
		f.status.accepted(ctx, f.objectives.Path(), o, problems[o])
	}
	for _, o := range rewrites {
		f.status.accepted(ctx, f.rewrites.Path(), o, problems[o])
	}
	if pool := f.pools.Object(f.namespace, f.pool); pool != nil {
		f.status.pool(ctx, f.pools.Path(), pool)
	}
}

// ofPool returns the objects that belong to the pool, in order of precedence: the oldest first.
func (f *Follower) ofPool(all []*kube.Object) []*kube.Object {
	all = slices.DeleteFunc(all, func(o *kube.Object) bool {
		ref := o.Spec.PoolRef
		return o.Metadata.DeletionTimestamp != "" || ref.Name != f.pool || ref.Group != nil && *ref.Group != poolGroup
	})
	slices.SortFunc(all, func(a, b *kube.Object) int {
		return cmp.Or(cmp.Compare(a.Metadata.CreationTimestamp, b.Metadata.CreationTimestamp), cmp.Compare(a.Metadata.Name, b.Metadata.Name))
	})
	return all
}

// report counts the objects of a kind, and logs each new problem once.
func (f *Follower) report(kind string, objects []*kube.Object, problems map[*kube.Object]error) {
	invalid, present := 0, map[string]bool{}
	for _, o := range objects {
		name, err := kind+" "+o.Metadata.Name, problems[o]
		present[name] = true
		if err == nil {
			delete(f.logged, name)
			continue
		}
		invalid++
		if f.logged[name] != err.Error() {
			f.logged[name] = err.Error()
			f.o.Log.Error("an object of the InferencePool is invalid, so it changes nothing", "kind", kind, "name", o.Metadata.Name, "error", err)
		}
	}
	for name := range f.logged {
		if strings.HasPrefix(name, kind+" ") && !present[name] {
			delete(f.logged, name)
		}
	}
	f.o.Count(kind, len(objects)-invalid, invalid)
}
