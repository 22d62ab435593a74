// Command manual writes the manual pages and the shell completions of pdproxy, for the
// archives and packages of a release. Both come from the commands themselves.
package main

import (
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/pdproxy/pdproxy/cmd"
)

func main() {
	version := flag.String("version", cmd.Version, "release that the pages name")
	date := flag.Int64("date", 0, "date of the pages, in seconds since 1970")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: manual [-version RELEASE] [-date SECONDS] FOLDER")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := write(flag.Arg(0), *version, time.Unix(*date, 0).UTC()); err != nil {
		fmt.Fprintln(os.Stderr, "manual:", err)
		os.Exit(1)
	}
}

// write replaces the folders man and completions in dir.
func write(dir, version string, date time.Time) error {
	man, completions := filepath.Join(dir, "man"), filepath.Join(dir, "completions")
	for _, d := range []string{man, completions} {
		if err := os.RemoveAll(d); err != nil {
			return err
		}
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	root := cmd.Tree()
	if err := writePages(root, man, version, date); err != nil {
		return err
	}
	return writeCompletions(root, completions)
}

// writePages writes one compressed page for each command that is not hidden. The same
// commands, version and date give the same bytes.
func writePages(root *cobra.Command, dir, version string, date time.Time) error {
	root.DisableAutoGenTag = true
	header := &doc.GenManHeader{Section: "1", Date: &date, Source: "pdproxy " + version, Manual: "pdproxy"}
	if err := doc.GenManTree(root, header, dir); err != nil {
		return err
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil {
		return err
	}
	for _, page := range pages {
		if err := compress(page); err != nil {
			return err
		}
	}
	return nil
}

// compress replaces a file by file.gz, whose head holds neither name nor time.
func compress(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	out, err := os.Create(file + ".gz")
	if err != nil {
		return err
	}
	defer out.Close()
	z, err := gzip.NewWriterLevel(out, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := z.Write(text); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Remove(file)
}

// writeCompletions writes the scripts under the names that the shells look for.
func writeCompletions(root *cobra.Command, dir string) error {
	if err := root.GenBashCompletionFileV2(filepath.Join(dir, "pdproxy"), true); err != nil {
		return err
	}
	if err := root.GenZshCompletionFile(filepath.Join(dir, "_pdproxy")); err != nil {
		return err
	}
	return root.GenFishCompletionFile(filepath.Join(dir, "pdproxy.fish"), true)
}
