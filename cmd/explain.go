package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

func (a *app) explainCommand() *cobra.Command {
	var admin adminFlags
	c := &cobra.Command{
		Use:   "explain REQUEST_ID",
		Short: "Show why each leg of a request ran on its engine",
		Long: `Show why each leg of a request ran on its engine: the candidates with their facts
and scores, the legs with their times, and every fallback.

The answer to a client has the id of its request in the header x-request-id.`,
		Example: `  pdproxy explain 0198f3c2-7d1e-7c1a-9a53-0c7b1f6a2d10
  pdproxy explain --admin 10.0.0.5:9090 --token-file admin.token REQUEST_ID`,
		Args: arguments("REQUEST_ID"),
		RunE: func(_ *cobra.Command, args []string) error { return a.explain(args[0], admin) },
	}
	admin.add(c)
	return a.addJSON(c)
}

func (a *app) explain(id string, admin adminFlags) error {
	target, err := admin.target()
	if err != nil {
		return err
	}
	if target.missing != nil {
		fmt.Fprintln(a.err, "pdproxy: request without the admin token:", target.missing)
	}
	resp, err := target.get("/v1/explain/" + url.PathEscape(id))
	if err != nil {
		return exit.Failed(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return exit.Failed(err)
	}
	if resp.StatusCode != http.StatusOK {
		return exit.Failed(fmt.Errorf("explain %s: %s", id, refusal(resp.Status, body)))
	}
	if a.json {
		_, err := a.out.Write(body)
		return exit.Failed(err)
	}
	var e journal.Explanation
	if err := json.Unmarshal(body, &e); err != nil {
		return exit.Failed(err)
	}
	return exit.Failed(a.printExplanation(&e))
}

func (a *app) printExplanation(e *journal.Explanation) error {
	fmt.Fprintf(a.out, "request %s: %s (status %d) in %.1f ms, flow %s, policy %s, disagg id %d\n",
		e.RequestID, e.Outcome, e.Status, e.DurationMS, e.Flow, e.Policy, e.DisaggID)
	if e.RequestedModel != "" {
		fmt.Fprintf(a.out, "model %s, requested as %s\n", e.Model, e.RequestedModel)
	}
	if e.Coordination != "" {
		fmt.Fprintf(a.out, "coordination policy: %s\n", e.Coordination)
	}
	if e.Turn > 0 {
		fmt.Fprintf(a.out, "turn %d of conversation %s\n", e.Turn, orNone(e.Conversation))
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "LEG\tENGINE\tRANK\tATTEMPT\tSTART (ms)\tFIRST BYTE (ms)\tEND (ms)\tSTATUS\tERROR")
	for _, l := range e.Legs {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%.1f\t%s\t%s\t%d\t%s\n",
			l.Phase, l.Engine, l.Rank, l.Attempt, l.StartMS, orDash(l.FirstByteMS), orDash(l.EndMS), l.Status, l.Error)
	}
	scored := false
	fmt.Fprintln(w, "\nCANDIDATE\tRANK\tCHOSEN FOR\tSCORE\tFACTS")
	for _, c := range e.Candidates {
		scored = scored || c.Score != nil
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\n", c.Engine, c.Rank, chosenFor(e, c), score(c.Score), facts(c.Facts))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(e.Candidates) > 0 && !scored {
		fmt.Fprintf(a.out, "policy %s gives no scores: it compares the facts\n", e.Policy)
	}
	for _, f := range e.Fallbacks {
		fmt.Fprintf(a.out, "fallback: %s (%s)\n", f.What, f.Reason)
	}
	for _, n := range e.Notes {
		fmt.Fprintf(a.out, "note: %s\n", n)
	}
	return nil
}

// refusal returns the message in the body of an error, or else the status.
func refusal(status string, body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		return status
	}
	return e.Error.Message
}

// chosenFor names the phases of the last attempt that ran on a candidate, or "-".
func chosenFor(e *journal.Explanation, c journal.ExplainedCandidate) string {
	last := 0
	for _, l := range e.Legs {
		last = max(last, l.Attempt)
	}
	var phases []string
	for _, l := range e.Legs {
		if l.Attempt == last && l.Engine == c.Engine && l.Rank == c.Rank {
			phases = append(phases, l.Phase)
		}
	}
	if len(phases) == 0 {
		return "-"
	}
	return strings.Join(phases, ", ")
}

// decidingFacts are the facts that most policies compare. They are shown even if they are
// zero, because zero decides too.
var decidingFacts = []string{"role", "tokens", "requests", "queued", "blocks_gpu"}

// facts lists the deciding facts of a candidate, and the others that are not zero.
func facts(facts map[string]any) string {
	var list []string
	add := func(name string) { list = append(list, fmt.Sprintf("%s=%v", name, facts[name])) }
	for _, name := range decidingFacts {
		if facts[name] != nil {
			add(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(facts)) {
		if slices.Contains(decidingFacts, name) {
			continue
		}
		switch facts[name] {
		case nil, false, 0.0, "", "none", "unknown":
		default:
			add(name)
		}
	}
	return strings.Join(list, " ")
}

func score(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.4g", *v)
}

func orNone(key string) string {
	if key == "" {
		return "(not known)"
	}
	return key
}

func orDash(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *v)
}
