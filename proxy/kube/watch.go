package kube

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// Selected are the objects of a Watch.
type Selected struct {
	// Paths are the paths of the listing. A server that does not have the first one answers 404
	// for it; then the next one counts. If the server has none of them, there are no objects.
	Paths []string
	// Labels and Fields are selectors; "": all objects of the path.
	Labels, Fields string
}

// Watch follows the objects of one path. It lists them, and then watches from the version of
// the list on.
type Watch struct {
	Selected
	client  *Client
	note    func(error) // gets the result of each attempt; nil: success
	changed func()      // called after each change
	version string      // the last version received; used by Run only

	mu      sync.Mutex
	path    string             // of the last listing; guarded by mu
	objects map[string]*Object // by key; nil before the first listing; each object is immutable; guarded by mu
}

// NewWatch returns a watch. Run calls note after each attempt, and changed after each change.
func NewWatch(client *Client, what Selected, note func(error), changed func()) *Watch {
	return &Watch{Selected: what, client: client, note: note, changed: changed}
}

// Run follows the objects until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	for ctx.Err() == nil {
		listed := time.Now()
		err := w.List(ctx)
		for err == nil && ctx.Err() == nil && time.Since(listed) < listEvery {
			w.note(nil)
			if w.Path() == "" { // the server may have the objects later
				pause(ctx, absentAgain)
				break
			}
			began := time.Now()
			err = w.client.watch(ctx, w.Path(), w.selectors(), w.version, w.take)
			if err == nil && time.Since(began) < again { // a working server does not end a watch so early
				pause(ctx, again)
			}
		}
		if ctx.Err() == nil && err != nil && !errors.Is(err, errGone) {
			w.note(err)
		}
		pause(ctx, again)
	}
}

// absentAgain is the pause before the next listing if the server has none of the paths.
const absentAgain = 30 * time.Second

func (w *Watch) selectors() url.Values {
	query := url.Values{}
	if w.Labels != "" {
		query.Set("labelSelector", w.Labels)
	}
	if w.Fields != "" {
		query.Set("fieldSelector", w.Fields)
	}
	return query
}

// List replaces the objects by those of a new listing.
func (w *Watch) List(ctx context.Context) error {
	var listed list
	var found string // the path
	var err error
	for _, path := range w.Paths {
		if listed, err = w.client.list(ctx, path, w.selectors()); err == nil {
			found = path
			break
		}
		if !Is(err, http.StatusNotFound) {
			return err
		}
	}
	if err != nil {
		if len(w.Paths) == 1 {
			return err
		}
		if err = w.client.serves(ctx); err != nil { // the 404 may come from another server
			return err
		}
	}
	objects := make(map[string]*Object, len(listed.Items))
	for i := range listed.Items {
		objects[listed.Items[i].Key()] = &listed.Items[i]
	}
	w.version = listed.Metadata.ResourceVersion
	w.mu.Lock()
	w.objects, w.path = objects, found
	w.mu.Unlock()
	w.changed()
	return nil
}

// take applies one event. An object whose labels no longer match the selector is
// reported as deleted.
func (w *Watch) take(kind string, o Object) {
	w.version = o.Metadata.ResourceVersion
	if kind == bookmark {
		return
	}
	w.mu.Lock()
	if kind == deleted {
		delete(w.objects, o.Key())
	} else if w.objects[o.Key()] != nil || len(w.objects) < maxObjects { // the next listing reports an excess
		w.objects[o.Key()] = &o
	}
	w.mu.Unlock()
	w.changed()
}

// Path returns the path of the objects; "": there was no listing, or the server has none of Paths.
func (w *Watch) Path() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.path
}

// Now returns the objects. listed is false before the first listing.
func (w *Watch) Now() (objects []*Object, listed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.objects {
		objects = append(objects, o)
	}
	return objects, w.objects != nil
}

// Object returns the object of that name, or nil.
func (w *Watch) Object(namespace, name string) *Object {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.objects[namespace+"/"+name]
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
