package scaling

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// faster divides the times of the ScaledObjects, so that 300 s are 3 s.
const faster = 100

// thresholds replaces the threshold of the first trigger: an engine of the test computes 8
// answers at a time, and 6 for each engine leave room for new ones. All other thresholds are
// those of the files.
var thresholds = map[string]float64{enginesim.RoleDecode: 6}

// scaledObject is the part of a ScaledObject that scales.
type scaledObject struct {
	Spec struct {
		MinReplicaCount, MaxReplicaCount int
		CooldownPeriod                   int
		Triggers                         []struct {
			MetricType string
			Metadata   struct{ Query, Threshold, ActivationThreshold string }
		}
		Advanced struct {
			HorizontalPodAutoscalerConfig struct {
				Behavior struct {
					ScaleDown struct {
						StabilizationWindowSeconds int
						Policies                   []struct {
							Type                 string
							Value, PeriodSeconds int
						}
					}
				}
			}
		}
	}
}

// ruleOf returns the rule of deploy/keda's file for a role.
func ruleOf(t *testing.T, role string) *rule {
	t.Helper()
	text, err := os.ReadFile("../../deploy/keda/" + role + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if text, err = json.Marshal(tree); err != nil {
		t.Fatal(err)
	}
	var o scaledObject
	if err := json.Unmarshal(text, &o); err != nil {
		t.Fatal(err)
	}
	down := o.Spec.Advanced.HorizontalPodAutoscalerConfig.Behavior.ScaleDown
	if len(down.Policies) != 1 || down.Policies[0].Type != "Pods" || down.Policies[0].Value != 1 {
		t.Fatalf("%s: the test knows only a scale down by one pod: %+v", role, down.Policies)
	}
	r := &rule{
		least: o.Spec.MinReplicaCount, most: o.Spec.MaxReplicaCount,
		window:   seconds(down.StabilizationWindowSeconds),
		step:     seconds(down.Policies[0].PeriodSeconds),
		cooldown: seconds(o.Spec.CooldownPeriod),
	}
	for i, of := range o.Spec.Triggers {
		if of.MetricType != "AverageValue" {
			t.Fatalf("%s: the test does not know metrics of the type %q", role, of.MetricType)
		}
		next := trigger{query: strings.ReplaceAll(of.Metadata.Query, "MODEL", modelName)}
		next.threshold, next.activation = number(t, of.Metadata.Threshold), number(t, of.Metadata.ActivationThreshold)
		if own := thresholds[role]; own > 0 && i == 0 {
			next.threshold = own
		}
		r.triggers = append(r.triggers, next)
	}
	return r
}

// seconds returns a time of a ScaledObject, faster.
func seconds(n int) time.Duration { return time.Duration(n) * time.Second / faster }

func number(t *testing.T, text string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}
