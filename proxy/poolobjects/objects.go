package poolobjects

import (
	"errors"
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/models"
)

// Bounds of the objects.
const (
	maxPriority = 1_000_000 // as of [[priority_class]]
	maxWeight   = 1_000_000 // llm-d-router, apix/v1alpha2/inferencemodelrewrite_types.go
)

// prioritiesOf returns the priorities of the valid InferenceObjectives, by name. problems gets an
// error for each of the others.
func prioritiesOf(objectives []*kube.Object, problems map[*kube.Object]error) map[string]int {
	found, distinct := map[string]int{}, map[int]bool{}
	for _, o := range objectives {
		priority := 0
		if o.Spec.Priority != nil {
			priority = *o.Spec.Priority
		}
		if priority < -maxPriority || priority > maxPriority {
			problems[o] = fmt.Errorf("spec.priority is %d, want %d to %d", priority, -maxPriority, maxPriority)
			continue
		}
		if distinct[priority] = true; len(distinct) > config.MaxBands {
			delete(distinct, priority)
			problems[o] = fmt.Errorf("spec.priority is %d, and older objects have %d other priorities, as many as may be", priority, config.MaxBands)
			continue
		}
		found[o.Metadata.Name] = priority
	}
	return found
}

// rewritesOf returns the rules of the valid InferenceModelRewrites, in order of precedence. problems
// gets an error for each of the others.
func rewritesOf(objects []*kube.Object, problems map[*kube.Object]error) (list []models.Rewrite) {
	for _, o := range objects {
		var own []models.Rewrite
		var err error
		for i := range o.Spec.Rules {
			if own, err = appendRule(own, &o.Spec.Rules[i]); err != nil {
				err = fmt.Errorf("spec.rules[%d]: %w", i, err)
				break
			}
		}
		if len(o.Spec.Rules) == 0 {
			err = errors.New("spec.rules is empty")
		}
		if err != nil {
			problems[o] = err
			continue
		}
		list = append(list, own...)
	}
	return list
}

// appendRule appends a rewrite for each name that the rule matches; a rule without matches is one
// for all names.
func appendRule(list []models.Rewrite, r *kube.Rule) ([]models.Rewrite, error) {
	targets, err := targetsOf(r)
	if err != nil {
		return nil, err
	}
	if len(r.Matches) == 0 {
		return append(list, models.Rewrite{Any: true, Targets: targets}), nil
	}
	for i, m := range r.Matches {
		switch {
		case m.Model == nil:
			return nil, fmt.Errorf("matches[%d].model is missing", i)
		case m.Model.Type != nil && *m.Model.Type != "Exact":
			return nil, fmt.Errorf("matches[%d].model.type is not Exact", i)
		}
		if err := config.CheckModelName(m.Model.Value); err != nil {
			return nil, fmt.Errorf("matches[%d].model.value %w", i, err)
		}
		list = append(list, models.Rewrite{Name: m.Model.Value, Targets: targets})
	}
	return list, nil
}

// targetsOf returns the targets of a rule. Without weights, all targets have the same one.
func targetsOf(r *kube.Rule) ([]models.RewriteTarget, error) {
	if n := len(r.Targets); n == 0 || n > config.MaxSplit {
		return nil, fmt.Errorf("targets has %d entries, want 1 to %d", n, config.MaxSplit)
	}
	var list []models.RewriteTarget
	for i, t := range r.Targets {
		weight := 1
		if t.Weight != nil {
			weight = *t.Weight
		}
		switch {
		case (t.Weight == nil) != (r.Targets[0].Weight == nil):
			return nil, errors.New("either all targets have a weight, or none has")
		case weight < 1 || weight > maxWeight:
			return nil, fmt.Errorf("targets[%d].weight is %d, want 1 to %d", i, weight, maxWeight)
		}
		if err := config.CheckModelName(t.ModelRewrite); err != nil {
			return nil, fmt.Errorf("targets[%d].modelRewrite %w", i, err)
		}
		list = append(list, models.RewriteTarget{Model: t.ModelRewrite, Weight: float64(weight)})
	}
	return list, nil
}
