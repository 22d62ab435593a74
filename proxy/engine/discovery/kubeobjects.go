package discovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// kubeObject holds the needed members of an EndpointSlice (discovery.k8s.io/v1), a Pod (v1)
// or an InferencePool (inference.networking.k8s.io/v1).
type kubeObject struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		ResourceVersion   string            `json:"resourceVersion"`
		DeletionTimestamp string            `json:"deletionTimestamp"`
		Labels            map[string]string `json:"labels"`
		Annotations       map[string]string `json:"annotations"`
	} `json:"metadata"`
	AddressType string         `json:"addressType"` // IPv4, IPv6 or FQDN
	Endpoints   []kubeEndpoint `json:"endpoints"`
	Ports       []struct {
		Name string `json:"name"`
		Port int    `json:"port"`
	} `json:"ports"`
	Spec struct { // of an InferencePool
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
	} `json:"spec"`
	Status struct { // of a Pod
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

// key identifies an object among those of its kind.
func (o *kubeObject) key() string { return o.Metadata.Namespace + "/" + o.Metadata.Name }

// kubeEndpoint is one backend of a Service. All its addresses lead to the same backend.
type kubeEndpoint struct {
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

// takesRequests reports whether new requests may go to the endpoint. The third
// condition, serving, is readiness regardless of termination. It is not used, because a
// draining engine gets no new requests. With publishNotReadyAddresses a terminating
// endpoint reports that it is ready.
func (e *kubeEndpoint) takesRequests() bool {
	c := e.Conditions
	return (c.Ready == nil || *c.Ready) && (c.Terminating == nil || !*c.Terminating) && len(e.Addresses) > 0
}

// kubeList is the answer to a listing.
type kubeList struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Items []kubeObject `json:"items"`

	parts int // of the items
}

// read decodes a listing object by object, within the limits of the number of objects and their
// parts: decoded at once, a listing would take up to 100 times its length.
func (l *kubeList) read(r io.Reader) error {
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
func (l *kubeList) items(d *json.Decoder) error {
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
		o, err := readKubeObject(raw)
		if err != nil {
			return err
		}
		if l.parts += o.parts(); len(l.Items) >= maxKubeObjects || l.parts > maxKubeParts {
			return fmt.Errorf("there are more than %d objects, or more than %d endpoints, ports and conditions", maxKubeObjects, maxKubeParts)
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

// readKubeObject decodes one object within the limits.
func readKubeObject(raw []byte) (o kubeObject, err error) {
	if len(raw) > maxKubeEvent || bytes.Count(raw, []byte("{")) > maxKubeBraces {
		return o, fmt.Errorf("an object has more than %d bytes or %d parts", maxKubeEvent, maxKubeBraces)
	}
	err = json.Unmarshal(raw, &o)
	return o, err
}

// parts returns the number of the object's endpoints, ports and conditions, and of the object
// itself.
func (o *kubeObject) parts() int {
	return 1 + len(o.Endpoints) + len(o.Ports) + len(o.Spec.TargetPorts) + len(o.Status.Conditions)
}

// kubeStatus is an error answer.
type kubeStatus struct {
	Message string `json:"message"`
	Code    int    `json:"code"`
}

// Kinds of events of a watch.
const (
	kubeAdded    = "ADDED"
	kubeModified = "MODIFIED"
	kubeDeleted  = "DELETED"
	kubeBookmark = "BOOKMARK" // its object has only a version
	kubeError    = "ERROR"    // the object of the event is a kubeStatus
)

// kubeEvent is one line of a watch.
type kubeEvent struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// take passes the event's object on. An error ends the watch.
func (e *kubeEvent) take(event func(kind string, o kubeObject)) error {
	switch e.Type {
	case kubeAdded, kubeModified, kubeDeleted, kubeBookmark:
		o, err := readKubeObject(e.Object)
		if err != nil {
			return fmt.Errorf("decode an object: %w", err)
		}
		if o.Metadata.ResourceVersion == "" {
			return errors.New("an object has no resourceVersion")
		}
		event(e.Type, o)
		return nil
	case kubeError:
		var s kubeStatus
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
