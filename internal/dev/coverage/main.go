// Command coverage shows the statements that the tests have run, by package.
// For each fuzz target it also shows the number of its seeds, the number of
// them that are files in testdata/fuzz, and the part of the target's package
// that the seeds alone reach.
//
// Usage:
//
//	coverage [-min percent] -profiles file,file folder...
//
// The profiles are those of go test -coverprofile. A statement is covered if it
// is covered in one of them. A folder with all folders below it is a group with
// a minimum. The command fails when a group is below the minimum, and when a
// fuzz target has no seed or fails on one.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"text/tabwriter"
)

func main() {
	least := flag.Float64("min", 0, "per cent of the statements of each group that must be covered")
	profiles := flag.String("profiles", "", "coverage profiles, with commas between them")
	flag.Parse()
	if *profiles == "" || flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := show(os.Stdout, strings.Split(*profiles, ","), flag.Args(), *least); err != nil {
		fmt.Fprintln(os.Stderr, "coverage:", err)
		os.Exit(1)
	}
}

func show(to io.Writer, profiles, folders []string, least float64) error {
	p := make(profile)
	for _, path := range profiles {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := p.add(string(text)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	module, err := goList("-m")
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "statements\tcovered\t package")
	var errs []error
	for _, folder := range folders {
		group := module[0] + "/" + folder
		all := tally{}
		for _, pkg := range p.packages() {
			if pkg == group || strings.HasPrefix(pkg, group+"/") {
				t := p.tally(pkg)
				all.add(t)
				fmt.Fprintf(table, "%d\t%s\t %s\n", t.all, t, strings.TrimPrefix(pkg, module[0]+"/"))
			}
		}
		fmt.Fprintf(table, "%d\t%s\t %s/... in all\n\t\t\n", all.all, all, folder)
		if all.percent() < least {
			errs = append(errs, fmt.Errorf("%s/... is covered to %s, below %.0f %%", folder, all, least))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return errors.Join(append(errs, showCorpora(to, module[0], folders))...)
}

// goList returns the lines that go list prints.
func goList(arguments ...string) ([]string, error) {
	list := exec.Command("go", append([]string{"list"}, arguments...)...)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	return strings.Split(string(bytes.TrimSpace(out)), "\n"), nil
}
