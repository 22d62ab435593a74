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
		fmt.Fprintln(a.err, "pdproxy: asking without the admin token:", target.missing)
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
		return exit.Failed(fmt.Errorf("explain %s: %s", id, resp.Status))
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
	if e.Coordination != "" {
		fmt.Fprintf(a.out, "coordination policy: %s\n", e.Coordination)
	}
	if e.Turn > 0 {
		fmt.Fprintf(a.out, "turn %d of conversation %s\n", e.Turn, orNone(e.Conversation))
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "LEG\tENGINE\tRANK\tATTEMPT\tSTART\tFIRST BYTE\tEND\tSTATUS\tERROR")
	for _, l := range e.Legs {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%.1f\t%s\t%s\t%d\t%s\n",
			l.Phase, l.Engine, l.Rank, l.Attempt, l.StartMS, orDash(l.FirstByteMS), orDash(l.EndMS), l.Status, l.Error)
	}
	fmt.Fprintln(w, "\nCANDIDATE\tRANK\tSCORE\tFACTS")
	for _, c := range e.Candidates {
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", c.Engine, c.Rank, score(c.Score), factsThatSay(c.Facts))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, f := range e.Fallbacks {
		fmt.Fprintf(a.out, "fallback: %s (%s)\n", f.What, f.Reason)
	}
	for _, n := range e.Notes {
		fmt.Fprintf(a.out, "note: %s\n", n)
	}
	return nil
}

// factsThatSay lists the facts of a candidate that are not zero.
func factsThatSay(facts map[string]any) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(facts)) {
		switch v := facts[name]; v {
		case nil, false, 0.0, "", "none", "unknown":
		default:
			list = append(list, fmt.Sprintf("%s=%v", name, v))
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
