package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
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
		var o kubeObject
		if err := json.Unmarshal(e.Object, &o); err != nil {
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
