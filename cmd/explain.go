package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
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
and scores, the legs with their times and the causes of failures, each place at which the stream
broke off, and every fallback. Scores have the unit and the direction that the policy states.

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
	fmt.Fprintf(a.out, "request %s: %s (status %d) in %s ms\n", e.RequestID, e.Outcome, e.Status, rounded(e.DurationMS))
	if e.Policy != "" {
		fmt.Fprintf(a.out, "flow %s, policy %s, disagg id %d\n", e.Flow, e.Policy, e.DisaggID)
	}
	if e.RequestedModel != "" {
		fmt.Fprintf(a.out, "model %s, requested as %s\n", e.Model, e.RequestedModel)
	}
	if e.Coordination != "" {
		fmt.Fprintf(a.out, "coordination policy: %s\n", e.Coordination)
	}
	if e.Turn > 0 {
		fmt.Fprintf(a.out, "turn %d of conversation %s\n", e.Turn, orNone(e.Conversation))
	}
	if err := a.printLegs(e); err != nil {
		return err
	}
	if err := a.printCandidates(e); err != nil {
		return err
	}
	for _, c := range e.Continuations {
		fmt.Fprintf(a.out, "the stream broke off at %s ms, behind %d tokens: %s", rounded(c.AtMS), c.Tokens, c.Result)
		if c.GapMS != nil {
			fmt.Fprintf(a.out, " on %s after a gap of %s ms", strings.TrimPrefix(c.Prefill+" and "+c.Decode, " and "), rounded(*c.GapMS))
		}
		fmt.Fprintln(a.out)
	}
	for _, f := range e.Fallbacks {
		fmt.Fprintf(a.out, "fallback: %s (%s)\n", f.What, f.Reason)
	}
	for _, n := range e.Notes {
		fmt.Fprintf(a.out, "note: %s\n", n)
	}
	return nil
}

func (a *app) printLegs(e *journal.Explanation) error {
	if len(e.Legs) == 0 {
		_, err := fmt.Fprintln(a.out, "the request had no leg")
		return err
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "\nLEG\tENGINE\tRANK\tATTEMPT\tSTART (ms)\tFIRST BYTE (ms)\tEND (ms)\tSTATUS\tERROR")
	for _, l := range e.Legs {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n",
			l.Phase, l.Engine, l.Rank, l.Attempt, rounded(l.StartMS), orDash(l.FirstByteMS), orDash(l.EndMS), status(l.Status), failure(l))
	}
	return w.Flush()
}

func (a *app) printCandidates(e *journal.Explanation) error {
	if len(e.Candidates) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "\nCANDIDATE\tRANK\tCHOSEN FOR\t%s\tFACTS\n", scoreTitle(e))
	scored := false
	for _, c := range e.Candidates {
		scored = scored || c.Score != nil
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\n", c.Engine, c.Rank, chosenFor(e, c), orDash(c.Score), facts(c.Facts))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	switch {
	case !scored:
		fmt.Fprintf(a.out, "policy %s gives no scores: it compares the facts\n", e.Policy)
	case e.ScoreBetter == "":
		fmt.Fprintf(a.out, "policy %s does not state whether a high score is good\n", e.Policy)
	}
	return nil
}

// failure returns why a leg failed: the reason, and the text of the error.
func failure(l journal.ExplainedLeg) string {
	if l.Cause == "" {
		return l.Error
	}
	return l.Error + ": " + l.Cause
}

// scoreTitle returns the title of the scores, with their unit and the better score.
func scoreTitle(e *journal.Explanation) string {
	var about []string
	if e.ScoreUnit != "" {
		about = append(about, e.ScoreUnit)
	}
	if e.ScoreBetter != "" {
		about = append(about, e.ScoreBetter+" is good")
	}
	if about == nil {
		return "SCORE"
	}
	return "SCORE (" + strings.Join(about, ", ") + ")"
}

// refusal returns the message in the body of an error, or else the status.
func refusal(status string, body []byte) string {
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		return status
	}
	return e.Error.Message
}

// chosenFor names the phases whose last try ran on a candidate, or "-".
func chosenFor(e *journal.Explanation, c journal.ExplainedCandidate) string {
	last := map[string]int{} // by phase
	for _, l := range e.Legs {
		last[l.Phase] = max(last[l.Phase], l.Attempt)
	}
	var phases []string
	for _, l := range e.Legs {
		if l.Attempt == last[l.Phase] && l.Engine == c.Engine && l.Rank == c.Rank {
			phases = append(phases, l.Phase)
		}
	}
	if len(phases) == 0 {
		return "-"
	}
	return strings.Join(phases, ", ")
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
	return rounded(*v)
}

// status returns an HTTP status, or "-" if a leg got none.
func status(code int) string {
	if code == 0 {
		return "-"
	}
	return strconv.Itoa(code)
}
