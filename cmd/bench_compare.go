package cmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/loadgen"
)

func (a *app) benchCompareCommand() *cobra.Command {
	var slo, html string
	c := &cobra.Command{
		Use:   "compare A.jsonl B.jsonl",
		Short: "Compare two results of pdproxy bench --output",
		Long: `Compare two results of pdproxy bench --output: the change of each figure from A to B,
and an interval that contains the change with a confidence of 95 %.

The interval comes from a bootstrap over the requests of each run, drawn in blocks
of neighbours. It covers the chance of which requests came, not differences
between machines, days or caches: repeat both runs. Figures of which a run has one
value only, such as requests/s, have no interval. Runs of less than 20 requests
have none either. Of two sweeps, the runs with the same value are compared.`,
		Example: `  pdproxy bench --url http://127.0.0.1:8080 --output a.jsonl
  pdproxy bench --url http://127.0.0.1:8081 --output b.jsonl
  pdproxy bench compare a.jsonl b.jsonl --slo ttft=500ms --html compare.html`,
		Args: arguments("A", "B"),
		RunE: func(_ *cobra.Command, args []string) error {
			limits, err := loadgen.ParseLimits(slo)
			if err != nil {
				return fmt.Errorf("--slo: %w", err)
			}
			return a.benchCompare(args[0], args[1], limits, html)
		},
	}
	c.Flags().StringVar(&slo, "slo", "", "limits of a good request, as for pdproxy bench")
	c.Flags().StringVar(&html, "html", "", "file for a report with plots")
	completeFile(c, "html", "html")
	return a.addJSON(c)
}

func (a *app) benchCompare(pathA, pathB string, limits loadgen.Limits, html string) error {
	var runs [2][]*loadgen.Result
	for i, path := range []string{pathA, pathB} {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		runs[i], err = loadgen.ReadRuns(f, limits)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	comparisons, err := loadgen.CompareRuns(runs[0], runs[1])
	if err != nil {
		return fmt.Errorf("%s, %s: %w", pathA, pathB, err)
	}
	if html != "" {
		report := loadgen.Report{Title: "A: " + filepath.Base(pathA) + ", B: " + filepath.Base(pathB), Comparisons: comparisons}
		for i, name := range []string{"A", "B"} {
			for _, r := range runs[i] {
				r.Run = name + " " + r.Run
				report.Runs = append(report.Runs, r)
			}
		}
		if err := writeBenchHTML(html, &report); err != nil {
			return exit.Failed(fmt.Errorf("--html: %w", err))
		}
	}
	if a.json {
		return exit.Failed(a.printJSON(comparisons))
	}
	for i, c := range comparisons {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := a.printComparison(&c); err != nil {
			return exit.Failed(err)
		}
	}
	_, err = fmt.Fprintln(a.out, "\nThe interval contains the change with a confidence of 95 %, if only the random choice of requests causes the variation.")
	return exit.Failed(err)
}

func (a *app) printComparison(c *loadgen.Comparison) error {
	if c.Run != "" {
		fmt.Fprintf(a.out, "%s\n", c.Run)
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tA\tB\tchange\t95 % interval\tB is\t")
	for _, d := range c.Differences {
		change, interval := "-", "-"
		if d.Change != nil {
			change = loadgen.Percent(*d.Change)
		}
		if d.Interval != nil {
			interval = loadgen.Percent(d.Interval[0]) + " to " + loadgen.Percent(d.Interval[1])
		}
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%s\t%s\t%s\t\n", d.Name, d.A, d.B, change, interval, d.Verdict)
	}
	return w.Flush()
}

func writeBenchHTML(path string, report *loadgen.Report) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(report.WriteHTML(f), f.Close())
}
