package poolobjects

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/kube"
)

// controllerName identifies the entries of this program in the status of an InferencePool.
const controllerName = "pdproxy/endpoint-picker"

// maxConditions bounds the conditions of an object, and maxParents the parents of a pool, as the
// schemas do.
const (
	maxConditions = 8
	maxParents    = 32
)

// statusWriter writes the status of the objects of a pool.
type statusWriter struct {
	client *kube.Client
	log    *slog.Logger
	// wrote is the last status of each object that was written, by the object's UID. If another
	// controller replaces the status, the writer leaves it: two controllers must not fight.
	wrote  map[string]written
	failed map[string]string // the last problem of each object that was logged, by its key
}

// written is a status that was written.
type written struct {
	key     string // its content without times
	version string // of the object before
}

// maxWritten bounds the objects in a map of a statusWriter.
const maxWritten = 10_000

func newStatusWriter(client *kube.Client, log *slog.Logger) statusWriter {
	return statusWriter{client: client, log: log, wrote: map[string]written{}, failed: map[string]string{}}
}

// accepted writes the condition Accepted of an object.
func (w *statusWriter) accepted(ctx context.Context, path string, o *kube.Object, problem error) {
	c := kube.Condition{Type: "Accepted", Status: "True", Reason: "Accepted", Message: "the endpoint picker applies the object", ObservedGeneration: o.Metadata.Generation}
	if problem != nil {
		c.Status, c.Reason, c.Message = "False", "Invalid", problem.Error()
	}
	if holds(o.Status.Conditions, c) {
		return
	}
	conditions := slices.DeleteFunc(slices.Clone(o.Status.Conditions), func(other kube.Condition) bool { return other.Type == c.Type })
	if len(conditions) >= maxConditions {
		return
	}
	w.write(ctx, path, o, keyOf("", c), map[string]any{"conditions": append(conditions, stamped(c))})
}

// parent is the entry of this program in the status of an InferencePool.
type parent struct {
	Ref struct {
		Group     string `json:"group"`
		Kind      string `json:"kind"`
		Name      string `json:"name"`
		Namespace string `json:"namespace,omitempty"`
	} `json:"parentRef"`
	Controller string           `json:"controllerName"`
	Conditions []kube.Condition `json:"conditions"`
}

// pool writes the entry of this program in the status of the pool. The other entries stay as they
// are. Without an endpointPickerRef there is no parent to name, so nothing is written.
func (w *statusWriter) pool(ctx context.Context, path string, o *kube.Object) {
	own, ok := w.parentOf(ctx, o)
	if !ok {
		return
	}
	var others []json.RawMessage
	present := false
	for _, raw := range o.Status.Parents {
		var p parent
		if err := json.Unmarshal(raw, &p); err != nil || p.Controller != controllerName {
			others = append(others, raw)
			continue
		}
		present = present || p.Ref.Kind == own.Ref.Kind && p.Ref.Name == own.Ref.Name &&
			len(p.Conditions) == len(own.Conditions) && !slices.ContainsFunc(own.Conditions, func(c kube.Condition) bool { return !holds(p.Conditions, c) })
	}
	if present || len(others) >= maxParents {
		return
	}
	key := keyOf(own.Ref.Name, own.Conditions...)
	for i := range own.Conditions {
		own.Conditions[i] = stamped(own.Conditions[i])
	}
	entry, err := json.Marshal(own)
	if err != nil {
		w.log.Error("the status of the InferencePool cannot be written", "error", err)
		return
	}
	w.write(ctx, path, o, key, map[string]any{"parents": append(others, entry)})
}

// parentOf returns the entry of this program. The parent is the Service that the pool names as its
// endpoint picker: Gateways are the parents of gateway controllers.
func (w *statusWriter) parentOf(ctx context.Context, o *kube.Object) (p parent, ok bool) {
	ref := o.Spec.EndpointPickerRef
	if ref == nil || ref.Name == "" {
		return p, false
	}
	p.Ref.Kind, p.Ref.Group, p.Ref.Name, p.Controller = cmp.Or(ref.Kind, "Service"), ref.Group, ref.Name, controllerName
	accepted := kube.Condition{Type: "Accepted", Status: "True", Reason: "Accepted", Message: "the endpoint picker follows the pool"}
	resolved := kube.Condition{Type: "ResolvedRefs", Status: "True", Reason: "ResolvedRefs", Message: "the Service of the endpoint picker exists"}
	unresolved := func(message string) {
		resolved.Status, resolved.Reason, resolved.Message = "False", "InvalidExtensionRef", message
	}
	switch {
	case p.Ref.Group != "" || p.Ref.Kind != "Service":
		unresolved("endpointPickerRef is not a Service")
	case ref.Port == nil:
		unresolved("endpointPickerRef of a Service needs a port")
	default:
		_, err := w.client.Read(ctx, "/api/v1/namespaces/"+url.PathEscape(o.Metadata.Namespace)+"/services/"+url.PathEscape(ref.Name))
		if kube.Is(err, http.StatusNotFound) {
			unresolved("the Service of endpointPickerRef does not exist")
		} else if err != nil {
			w.complain(o, err.Error())
			return p, false
		}
	}
	p.Conditions = []kube.Condition{accepted, resolved}
	for i := range p.Conditions {
		p.Conditions[i].ObservedGeneration = o.Metadata.Generation
	}
	return p, true
}

// write writes the status of an object, once for each key: its content without times.
func (w *statusWriter) write(ctx context.Context, path string, o *kube.Object, key string, status map[string]any) {
	switch before := w.wrote[o.Metadata.UID]; {
	case before.key == key && before.version == o.Metadata.ResourceVersion:
		return // the watch has not reported the write yet
	case before.key == key:
		w.complain(o, "another controller replaces the status, so it is not written again")
		return
	}
	_, err := w.client.Write(ctx, http.MethodPatch, path+"/"+url.PathEscape(o.Metadata.Name)+"/status", map[string]any{
		"metadata": map[string]string{"resourceVersion": o.Metadata.ResourceVersion}, "status": status,
	})
	switch {
	case err == nil:
		if len(w.wrote) >= maxWritten {
			clear(w.wrote)
		}
		w.wrote[o.Metadata.UID] = written{key, o.Metadata.ResourceVersion}
		delete(w.failed, o.Metadata.UID)
	case !kube.Is(err, http.StatusConflict) && ctx.Err() == nil: // after a conflict the next event has the new version
		w.complain(o, err.Error())
	}
}

// complain logs a problem of an object once.
func (w *statusWriter) complain(o *kube.Object, problem string) {
	if w.failed[o.Metadata.UID] == problem {
		return
	}
	if len(w.failed) >= maxWritten {
		clear(w.failed)
	}
	w.failed[o.Metadata.UID] = problem
	w.log.Warn("the status of an object of the InferencePool cannot be written", "object", o.Key(), "error", problem)
}

// holds reports whether the conditions have c, perhaps with another time.
func holds(list []kube.Condition, c kube.Condition) bool {
	return slices.ContainsFunc(list, func(other kube.Condition) bool {
		other.LastTransitionTime = ""
		return other == c
	})
}

// stamped returns c with the present time as that of its last transition.
func stamped(c kube.Condition) kube.Condition {
	c.LastTransitionTime = time.Now().UTC().Format(time.RFC3339)
	return c
}

// keyOf returns a text for a name and conditions without times.
func keyOf(name string, list ...kube.Condition) string {
	text, _ := json.Marshal(list) // of strings and numbers: never fails
	return name + " " + string(text)
}
