package admin

import "errors"

// Policies lists and reloads the policies and filters of a process. Safe for concurrent
// use.
type Policies interface {
	List() []PolicyRow
	// Reload loads the policy of that name again. After an error the old version stays in
	// use. The error is ErrUnknownPolicy if no policy has that name.
	Reload(name string) error
}

// ErrUnknownPolicy is the error of Policies.Reload for an unknown name.
var ErrUnknownPolicy = errors.New("no policy or plugin of that name")

// PolicyRow is one row of GET /v1/policies.
type PolicyRow struct {
	Name          string  `json:"name"`
	Phase         string  `json:"phase"`
	VersionSHA256 string  `json:"version_sha256"`
	Runtime       string  `json:"runtime"`
	State         string  `json:"state"`
	Calls         uint64  `json:"calls"`
	Failures      uint64  `json:"failures"`
	MeanUS        float64 `json:"mean_us"`
	P99US         float64 `json:"p99_us"`
}

// add adds the numbers of the same policy in another process. The p99 becomes the larger
// of the two.
func (p *PolicyRow) add(o PolicyRow) {
	if n := p.Calls + o.Calls; n > 0 {
		p.MeanUS = (p.MeanUS*float64(p.Calls) + o.MeanUS*float64(o.Calls)) / float64(n)
	}
	p.Calls += o.Calls
	p.Failures += o.Failures
	p.P99US = max(p.P99US, o.P99US)
}
