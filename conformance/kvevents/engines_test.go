package kvevents

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// python is Debian's own Python, which finds Debian's packages.
const python = "/usr/bin/python3"

// install ensures that python has the script's imports.
func install() error { return testbed.Install(imports, "python3", "python3-zmq", "python3-msgpack") }

func imports() error {
	if out, err := exec.Command(python, "-c", "import zmq, msgpack").CombinedOutput(); err != nil {
		return fmt.Errorf("import zmq and msgpack: %w\n%s", err, out)
	}
	return nil
}

// script is a running engine.py.
type script struct {
	t       *testing.T
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *bufio.Reader
	events  int // ports of rank 0
	replay  int
}

// row is the expected content of the index for one prompt: the number of
// leading blocks that are held, by their best tier.
type row struct {
	Tokens     []uint32
	Lora, Salt string
	Held       [3]uint32
}

// start runs engine.py on the ports, or on free ones if they are 0.
func start(t *testing.T, encoding string, events, replay, seed int) *script {
	t.Helper()
	if err := install(); err != nil {
		t.Fatal(err)
	}
	if events == 0 {
		events, replay = testbed.Ports(t, 2), testbed.Ports(t, 2)
	}
	s := &script{t: t, events: events, replay: replay}
	s.cmd = exec.Command(python, "testdata/engine.py", encoding, strconv.Itoa(events), strconv.Itoa(replay), strconv.Itoa(seed))
	s.cmd.Stderr = os.Stderr
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.answers = bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	s.steps(0)
	return s
}

// kill ends the engine as a crash does. A second call has no effect.
func (s *script) kill() {
	if s.cmd.ProcessState != nil {
		return
	}
	if err := s.cmd.Process.Kill(); err != nil {
		s.t.Log(err)
	}
	if err := s.cmd.Wait(); err == nil {
		s.t.Error("the engine ended without a signal")
	}
}

// do sends a command and reads its answer.
func (s *script) do(command map[string]any, answer any) {
	s.t.Helper()
	line, err := json.Marshal(command)
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.in.Write(append(line, '\n')); err != nil {
		s.t.Fatal(err)
	}
	if line, err = s.answers.ReadBytes('\n'); err != nil {
		s.t.Fatalf("%v: %v", command, err)
	}
	if err := json.Unmarshal(line, answer); err != nil {
		s.t.Fatal(err)
	}
}

func (s *script) steps(n int, faults ...string) {
	s.t.Helper()
	s.do(map[string]any{"op": "steps", "n": n, "faults": append([]string{}, faults...)}, &struct{}{})
}

// op sends a command that has no arguments.
func (s *script) op(name string) {
	s.t.Helper()
	s.do(map[string]any{"op": name}, &struct{}{})
}

// check returns the rows of each rank. The last row of a rank is a prompt that
// was just stored for the first time.
func (s *script) check() [][]row {
	s.t.Helper()
	var answer struct{ Ranks [][]row }
	s.do(map[string]any{"op": "check"}, &answer)
	return answer.Ranks
}
