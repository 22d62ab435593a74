package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// Object holds the needed members of an EndpointSlice (discovery.k8s.io/v1), a Pod (v1), an
// InferencePool (inference.networking.k8s.io/v1), an InferenceObjective or InferenceModelRewrite
// (llm-d.ai/v1alpha2, inference.networking.x-k8s.io/v1alpha2), or a Lease (coordination.k8s.io/v1).
type Object struct {
	Metadata    Metadata   `json:"metadata"`
	AddressType string     `json:"addressType"` // IPv4, IPv6 or FQDN
	Endpoints   []Endpoint `json:"endpoints"`
	Ports       []struct {
		Name string `json:"name"`
		Port int    `json:"port"`
	} `json:"ports"`
	Spec   Spec   `json:"spec"`
	Status Status `json:"status"`
}

// Metadata identifies an object.
type Metadata struct {
	Name              string            `json:"name"`
	Namespace         string            `json:"namespace"`
	UID               string            `json:"uid"`
	ResourceVersion   string            `json:"resourceVersion"`
	Generation        int64             `json:"generation"`
	CreationTimestamp string            `json:"creationTimestamp"` // RFC 3339 in UTC: texts sort as times do
	DeletionTimestamp string            `json:"deletionTimestamp"`
	Labels            map[string]string `json:"labels"`
	Annotations       map[string]string `json:"annotations"`
}

// Spec is the wanted state of an object.
type Spec struct {
	// Of an InferencePool.
	Selector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	} `json:"selector"`
	TargetPorts []struct {
		Number int `json:"number"`
	} `json:"targetPorts"`
	EndpointPickerRef *struct {
		Group string `json:"group"`
		Kind  string `json:"kind"`
		Name  string `json:"name"`
		Port  *struct {
			Number int `json:"number"`
		} `json:"port"`
	} `json:"endpointPickerRef"`
	// Of an InferenceObjective or InferenceModelRewrite.
	PoolRef struct {
		Group *string `json:"group"`
		Name  string  `json:"name"`
	} `json:"poolRef"`
	Priority *int   `json:"priority"`
	Rules    []Rule `json:"rules"`
	// Of a Lease.
	HolderIdentity   string `json:"holderIdentity"`
	LeaseTransitions int    `json:"leaseTransitions"`
}

// Rule is one rule of an InferenceModelRewrite.
type Rule struct {
	Matches []struct {
		Model *struct {
			Type  *string `json:"type"` // nil: Exact
			Value string  `json:"value"`
		} `json:"model"`
	} `json:"matches"`
	Targets []struct {
		Weight       *int   `json:"weight"`
		ModelRewrite string `json:"modelRewrite"`
	} `json:"targets"`
}

// Status is the observed state of an object.
type Status struct {
	PodIP      string            `json:"podIP"` // of a Pod
	Conditions []Condition       `json:"conditions"`
	Parents    []json.RawMessage `json:"parents"` // of an InferencePool
}

// Condition is a part of the state of an object.
type Condition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	Reason             string `json:"reason"`
	Message            string `json:"message"`
	ObservedGeneration int64  `json:"observedGeneration"`
	LastTransitionTime string `json:"lastTransitionTime"`
}

// Key identifies an object among those of its kind.
func (o *Object) Key() string { return o.Metadata.Namespace + "/" + o.Metadata.Name }

// Endpoint is one backend of a Service. All its addresses lead to the same backend.
type Endpoint struct {
	Addresses  []string `json:"addresses"`
	Zone       string   `json:"zone"` // of the node; "" if the node has none
	Conditions struct {
		Ready       *bool `json:"ready"` // absent means true
		Terminating *bool `json:"terminating"`
	} `json:"conditions"`
	TargetRef *struct {
		Kind      string `json:"kind"`
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
		UID       string `json:"uid"`
	} `json:"targetRef"`
}

// TakesRequests reports whether new requests may go to the endpoint. The third
// condition, serving, is readiness regardless of termination. It is not used, because a
// draining engine gets no new requests. With publishNotReadyAddresses a terminating
// endpoint reports that it is ready.
func (e *Endpoint) TakesRequests() bool {
	c := e.Conditions
	return (c.Ready == nil || *c.Ready) && (c.Terminating == nil || !*c.Terminating) && len(e.Addresses) > 0
}

// list is the answer to a listing.
type list struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Items []Object `json:"items"`

	parts int // of the items
}

// read decodes a listing object by object, within the limits of the number of objects and their
// parts: decoded at once, a listing would take up to 100 times its length.
func (l *list) read(r io.Reader) error {
	d := json.NewDecoder(r)
	if err := expect(d, json.Delim('{')); err != nil {
		return err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		switch key {
		case "metadata":
			err = d.Decode(&l.Metadata)
		case "items":
			err = l.items(d)
		default:
			var skipped json.RawMessage
			err = d.Decode(&skipped)
		}
		if err != nil {
			return err
		}
	}
	return expect(d, json.Delim('}'))
}

// items decodes the list of objects, or null.
func (l *list) items(d *json.Decoder) error {
	start, err := d.Token()
	if err != nil || start == nil {
		return err
	}
	if start != json.Delim('[') {
		return errors.New("items is no list")
	}
	l.Items, l.parts = nil, 0
	for d.More() {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return err
		}
		o, err := readObject(raw)
		if err != nil {
			return err
		}
		if l.parts += o.parts(); len(l.Items) >= maxObjects || l.parts > maxParts {
			return fmt.Errorf("there are more than %d objects, or more than %d endpoints, ports, rules and conditions", maxObjects, maxParts)
		}
		l.Items = append(l.Items, o)
	}
	return expect(d, json.Delim(']'))
}

// expect reads one token.
func expect(d *json.Decoder, want json.Delim) error {
	if t, err := d.Token(); err != nil {
		return err
	} else if t != want {
		return fmt.Errorf("found %v, want %v", t, want)
	}
	return nil
}

// readObject decodes one object within the limits.
func readObject(raw []byte) (o Object, err error) {
	if len(raw) > maxEvent || bytes.Count(raw, []byte("{")) > maxBraces {
		return o, fmt.Errorf("an object has more than %d bytes or %d parts", maxEvent, maxBraces)
	}
	err = json.Unmarshal(raw, &o)
	return o, err
}

// parts returns the number of the object's endpoints, ports, rules and conditions, and of the
// object itself.
func (o *Object) parts() int {
	n := 1 + len(o.Endpoints) + len(o.Ports) + len(o.Spec.TargetPorts) + len(o.Status.Conditions) + len(o.Status.Parents)
	for _, r := range o.Spec.Rules {
		n += 1 + len(r.Matches) + len(r.Targets)
	}
	return n
}

// status is an error answer.
type status struct {
	Message string `json:"message"`
	Code    int    `json:"code"`
}

// Kinds of events of a watch.
const (
	added    = "ADDED"
	modified = "MODIFIED"
	deleted  = "DELETED"
	bookmark = "BOOKMARK" // its object has only a version
	failed   = "ERROR"    // the object of the event is a status
)

// event is one line of a watch.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// take passes the event's object on. An error ends the watch.
func (e *event) take(to func(kind string, o Object)) error {
	switch e.Type {
	case added, modified, deleted, bookmark:
		o, err := readObject(e.Object)
		if err != nil {
			return fmt.Errorf("decode an object: %w", err)
		}
		if o.Metadata.ResourceVersion == "" {
			return errors.New("an object has no resourceVersion")
		}
		to(e.Type, o)
		return nil
	case failed:
		var s status
		if err := json.Unmarshal(e.Object, &s); err != nil {
			return fmt.Errorf("decode an error: %w", err)
		}
		if s.Code == http.StatusGone {
			return errGone
		}
		return fmt.Errorf("status %d %s", s.Code, clip(s.Message))
	default:
		return fmt.Errorf("unknown event %q", clip(e.Type))
	}
}
