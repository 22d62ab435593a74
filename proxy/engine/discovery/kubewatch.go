package discovery

import (
	"context"
	"errors"
	"sync"
	"time"
)

// kubeWatch follows the objects of one path that match a label selector. It lists them,
// and then watches from the version of the list on.
type kubeWatch struct {
	api            *kubeAPI
	path, selector string
	trouble        trouble
	changed        func() // called after each change

	mu      sync.Mutex
	objects map[string]*kubeObject // by key; nil before the first listing; each object is immutable
	version string                 // the last version received; used by run only
}

// run follows the objects until ctx ends.
func (w *kubeWatch) run(ctx context.Context) {
	for ctx.Err() == nil {
		listed := time.Now()
		err := w.list(ctx)
		for err == nil && ctx.Err() == nil && time.Since(listed) < kubeListEvery {
			w.trouble.note(nil)
			began := time.Now()
			err = w.api.watch(ctx, w.path, w.selector, w.version, w.take)
			if err == nil && time.Since(began) < listAgain { // a working server does not end a watch so early
				pause(ctx, listAgain)
			}
		}
		if ctx.Err() == nil && !errors.Is(err, errGone) {
			w.trouble.note(err)
		}
		pause(ctx, listAgain)
	}
}

// list replaces the objects by those of a new listing.
func (w *kubeWatch) list(ctx context.Context) error {
	list, err := w.api.list(ctx, w.path, w.selector)
	if err != nil {
		return err
	}
	objects := make(map[string]*kubeObject, len(list.Items))
	for i := range list.Items {
		objects[list.Items[i].key()] = &list.Items[i]
	}
	w.version = list.Metadata.ResourceVersion
	w.mu.Lock()
	w.objects = objects
	w.mu.Unlock()
	w.changed()
	return nil
}

// take applies one event. An object whose labels no longer match the selector is
// reported as deleted.
func (w *kubeWatch) take(kind string, o kubeObject) {
	w.version = o.Metadata.ResourceVersion
	if kind == kubeBookmark {
		return
	}
	w.mu.Lock()
	if kind == kubeDeleted {
		delete(w.objects, o.key())
	} else if w.objects[o.key()] != nil || len(w.objects) < maxKubeObjects { // the next listing reports an excess
		w.objects[o.key()] = &o
	}
	w.mu.Unlock()
	w.changed()
}

// now returns the objects. listed is false before the first listing.
func (w *kubeWatch) now() (objects []*kubeObject, listed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.objects {
		objects = append(objects, o)
	}
	return objects, w.objects != nil
}

// object returns the object of that name, or nil.
func (w *kubeWatch) object(namespace, name string) *kubeObject {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.objects[namespace+"/"+name]
}
