package idstore

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// markAnnotation is the annotation with the Unix time in ms below which id-time may be used already.
const markAnnotation = "pdproxy/ids"

// Lease is the Store of several coordinators in Kubernetes: an annotation of a Lease
// (coordination.k8s.io/v1), which nobody holds. All coordinators have the same lines. A coordinator
// raises the mark by a change of the version that it has read, so no two blocks share id-time.
type Lease struct {
	client           *kube.Client
	collection, name string
	lines            disaggid.Block

	mu   sync.Mutex
	seen int64 // the highest mark that this process has set; guarded by mu
}

// NewLease returns the store in a Lease, for the given lines; the block's times mean nothing.
// leases is the path of the Leases of the namespace.
func NewLease(client *kube.Client, leases, name string, lines disaggid.Block) *Lease {
	return &Lease{client: client, collection: leases, name: name, lines: lines}
}

// Reserve implements Store.
func (l *Lease) Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for range tries {
		o, err := l.client.Read(ctx, l.path())
		if kube.Is(err, http.StatusNotFound) {
			o, err = &kube.Object{}, nil
		}
		if err != nil {
			return disaggid.Block{}, err
		}
		b, err := l.raise(ctx, o, now, width)
		if err == nil || !kube.Is(err, http.StatusConflict) {
			return b, err
		}
	}
	return disaggid.Block{}, errLost
}

// raise raises the mark in o; without a version there is no Lease. The caller holds mu.
func (l *Lease) raise(ctx context.Context, o *kube.Object, now time.Time, width time.Duration) (b disaggid.Block, err error) {
	var mark int64
	if text := o.Metadata.Annotations[markAnnotation]; text == "" {
		now = now.Add(ahead)
	} else if mark, err = strconv.ParseInt(text, 10, 64); err != nil || mark < disaggid.Epoch || mark > disaggid.End {
		return b, fmt.Errorf("read the annotation %s of the Lease %s: no time in ms within id-time", markAnnotation, l.name)
	}
	b = l.lines
	if b.From, b.Until, err = block(now, max(mark, l.seen), width); err != nil {
		return disaggid.Block{}, err
	}
	method, path, metadata := http.MethodPatch, l.path(), map[string]any{
		"name": l.name, "annotations": map[string]string{markAnnotation: strconv.FormatInt(b.Until, 10)},
	}
	if o.Metadata.ResourceVersion == "" {
		method, path = http.MethodPost, l.collection
	} else {
		metadata["resourceVersion"] = o.Metadata.ResourceVersion
	}
	change := map[string]any{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
	if _, err := l.client.Write(ctx, method, path, change); err != nil {
		return disaggid.Block{}, err
	}
	l.seen = b.Until
	return b, nil
}

// Close implements Store.
func (l *Lease) Close(context.Context) error { return nil }

func (l *Lease) path() string { return l.collection + "/" + url.PathEscape(l.name) }
