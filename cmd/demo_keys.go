package cmd

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/cmd/terminal"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/quickstart"
)

// demoKeys returns the keys that a user presses while the demo runs, and a function that gives the
// terminal its former mode. Both are nil without a terminal, and if a program reads the output.
func (a *app) demoKeys(d demoFlags) (keys <-chan byte, restore func()) {
	if d.chaos || a.json {
		return nil, nil
	}
	return terminal.Keys(os.Stdin, a.out)
}

// pressDemoKeys kills and restarts engines until ctx ends.
func (a *app) pressDemoKeys(ctx context.Context, keys <-chan byte, engines []*demoEngine) {
	var dead []*demoEngine
	for {
		select {
		case <-ctx.Done():
			return
		case key := <-keys:
			switch key {
			case 'k', 'K':
				dead = a.killEngine(engines, dead)
			case 'r', 'R':
				dead = a.restartEngines(dead)
			}
		}
	}
}

// killEngine kills a decode engine, or a prefill engine if no decode engine is left. It returns all
// dead ones.
func (a *app) killEngine(engines, dead []*demoEngine) []*demoEngine {
	for _, role := range []string{enginesim.RoleDecode, enginesim.RolePrefill} {
		for _, e := range engines {
			if e.Cfg.Role == role && !e.dead {
				e.Kill()
				e.dead = true
				a.tellDemo("killed the %s engine %s; r restarts it", role, e.name)
				return append(dead, e)
			}
		}
	}
	a.tellDemo("all engines are dead; r restarts them")
	return dead
}

// restartEngines restarts the dead engines, and returns those that have not started.
func (a *app) restartEngines(dead []*demoEngine) (left []*demoEngine) {
	for _, e := range dead {
		if err := e.restart(); err != nil {
			a.tellDemo("cannot restart %s: %v", e.name, err)
			left = append(left, e)
			continue
		}
		e.dead = false
		a.tellDemo("restarted the %s engine %s", e.Cfg.Role, e.name)
	}
	if len(dead) == 0 {
		a.tellDemo("no engine is dead; k kills one")
	}
	return left
}

func (a *app) tellDemo(format string, args ...any) {
	fmt.Fprintf(a.out, "%s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// programName is the name by which the user has started the program, as a word of a shell: a path,
// or a name that the shell finds in PATH.
func programName() string { return quickstart.QuoteShell(os.Args[0]) }
