package cmd

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// choice is the list of the values of a flag. The list is the source of the help text, of
// the check and of the completion.
type choice struct {
	allowed []string
	// cut finds the part of a value that is in the list; nil: the whole value.
	cut func(value string) (before, part, after string)
	// other reports whether value is allowed without being in the list; nil: none is.
	other func(value string) bool
	// suffixes are the endings of files that the completion adds.
	suffixes []string
}

// choose makes c check and complete the values of a flag that c has. The list replaces %s in
// the text of the flag.
func choose(c *cobra.Command, flags *pflag.FlagSet, name string, ch choice) {
	f := flags.Lookup(name)
	f.Value = checkedValue{f.Value, ch}
	if f.DefValue == "[]" { // pflag knows only its own types of lists
		f.DefValue = ""
	}
	f.Usage = strings.Replace(f.Usage, "%s", strings.Join(ch.allowed, ", "), 1)
	if err := c.RegisterFlagCompletionFunc(name, ch.complete); err != nil {
		panic(err) // the flag exists, and has no completion yet
	}
}

// chooseOf is choose for a local flag whose value must be in the list.
func chooseOf(c *cobra.Command, name string, allowed ...string) {
	choose(c, c.Flags(), name, choice{allowed: allowed})
}

// complete returns the values that begin as text does.
func (ch choice) complete(_ *cobra.Command, _ []string, text string) ([]string, cobra.ShellCompDirective) {
	before, after := "", ""
	if ch.cut != nil {
		before, _, after = ch.cut(text)
	}
	var list []string
	for _, value := range ch.allowed {
		if value = before + value + after; strings.HasPrefix(value, text) {
			list = append(list, value)
		}
	}
	directive := cobra.ShellCompDirectiveNoFileComp
	switch {
	case len(list) == 0 && ch.suffixes != nil:
		return ch.suffixes, cobra.ShellCompDirectiveFilterFileExt
	case after != "":
		directive |= cobra.ShellCompDirectiveNoSpace
	}
	return list, directive
}

// checkedValue is the value of a flag with a choice.
type checkedValue struct {
	pflag.Value
	choice
}

// Set implements pflag.Value.
func (v checkedValue) Set(text string) error {
	part := text
	if v.cut != nil {
		_, part, _ = v.cut(text)
	}
	if v.other == nil || !v.other(text) {
		if err := config.OneOf(part, v.allowed...); err != nil {
			return err
		}
	}
	return v.Value.Set(text)
}

// behind returns a cut for values such as RATE:KIND, whose second part is in the list.
func behind(separator string) func(string) (before, part, after string) {
	return func(value string) (string, string, string) {
		before, part, ok := strings.Cut(value, separator)
		if !ok {
			return "", value, ""
		}
		return before + separator, part, ""
	}
}

// ahead returns a cut for values such as KIND:SEED, whose first part is in the list.
func ahead(separator string) func(string) (before, part, after string) {
	return func(value string) (string, string, string) {
		part, rest, _ := strings.Cut(value, separator)
		return "", part, separator + rest
	}
}

// flagError describes a mistake in the flags of c. The message begins with the flag.
func flagError(c *cobra.Command, err error) error {
	var value *pflag.InvalidValueError
	var name *pflag.NotExistError
	switch {
	case errors.As(err, &value):
		cause := value.Unwrap()
		if errors.Is(cause, strconv.ErrSyntax) || errors.Is(cause, strconv.ErrRange) {
			cause = fmt.Errorf("want %s, found %q", numberOf(value.GetFlag().Value.Type()), value.GetValue())
		}
		return fmt.Errorf("--%s: %w", value.GetFlag().Name, cause)
	case c.HasSubCommands() && c.Flags().NArg() > 0: // the flag may be one of the command that is meant
		return subcommand(c, c.Flags().Args())
	case errors.As(err, &name) && name.GetSpecifiedShortnames() == "":
		var known []string
		c.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, "--"+f.Name) })
		return fmt.Errorf("%w%s", err, config.DidYouMean("--"+name.GetSpecifiedName(), known))
	}
	return err
}

// numberOf describes the values of a type of flags.
func numberOf(kind string) string {
	switch {
	case kind == "bool":
		return "true or false"
	case strings.HasPrefix(kind, "float"):
		return "a number"
	}
	return "a whole number"
}
