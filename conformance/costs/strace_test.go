package costs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// calls returns how many system calls on sockets the program makes while during runs. Reads without
// a result do not count, nor do waits and wake-ups: their number depends on time.
func (p *proxy) calls(during func()) int {
	p.t.Helper()
	pid := strconv.Itoa(p.cmd.Process.Pid)
	file := filepath.Join(p.t.TempDir(), "calls")
	log := &testbed.Log{}
	trace := exec.Command("strace", "-f", "-y", "-e", "trace=desc,network", "-o", file, "-p", pid)
	trace.Stderr = log
	if err := trace.Start(); err != nil {
		p.t.Fatal(err)
	}
	testbed.Eventually(p.t, "strace has all threads", func() bool {
		threads, _ := filepath.Glob("/proc/" + pid + "/task/*/status")
		for _, status := range threads {
			text, err := os.ReadFile(status)
			if err != nil || strings.Contains(string(text), "TracerPid:\t0\n") {
				return false
			}
		}
		return len(threads) > 0
	})
	during()
	if err := trace.Process.Signal(syscall.SIGINT); err != nil {
		p.t.Fatal(err, log)
	}
	trace.Wait() // the signal is its error
	text, err := os.ReadFile(file)
	if err != nil {
		p.t.Fatal(err, log)
	}
	return countCalls(string(text))
}

// countCalls counts the calls on sockets in a log of strace -f -y, without reads that failed. A line
// is "PID NAME(FD<socket:[INODE]>, ...) = RESULT". A call during which another thread makes one has
// two lines, "PID NAME(FD<...>, ... <unfinished ...>" and "PID <... NAME resumed>...) = RESULT".
func countCalls(log string) (n int) {
	open := map[string]string{} // first lines of unfinished calls, by thread
	for line := range strings.Lines(log) {
		thread, call, _ := strings.Cut(strings.TrimSpace(line), " ")
		call = strings.TrimSpace(call)
		if strings.HasSuffix(call, "<unfinished ...>") {
			open[thread] = call
			continue
		}
		begin := call
		if strings.HasPrefix(call, "<... ") {
			begin = open[thread]
		}
		target, _, _ := strings.Cut(begin, ",")
		failed := strings.HasPrefix(begin, "read(") && strings.Contains(call, " = -1 ")
		if strings.Contains(target, "<socket:") && strings.Contains(call, " = ") && !failed {
			n++
		}
	}
	return n
}

func TestCountCalls(t *testing.T) {
	const log = `7 read(9<socket:[1]>, "x", 1) = 1
8 read(9<socket:[1]>, 0xc000, 4096) = -1 EAGAIN (Resource temporarily unavailable)
7 write(5<anon_inode:[eventfd]>, "\1\0", 8) = 8
7 write(9<socket:[1]>, "HTTP/1.1 = "..., 539 <unfinished ...>
8  recvfrom(10<socket:[2]>, 0xc1, 1, MSG_PEEK, NULL, NULL) = -1 EAGAIN (Resource temporarily unavailable)
8 read(10<socket:[2]>,  <unfinished ...>
7 <... write resumed>) = 539
8 <... read resumed>0xc000, 4096) = -1 EAGAIN (Resource temporarily unavailable)
7 --- SIGURG {si_signo=SIGURG} ---
7 epoll_pwait(4<anon_inode:[eventpoll]>, [], 128, 0, NULL, 0) = 0
7 accept4(3<socket:[3]>, NULL, NULL, SOCK_CLOEXEC <detached ...>
`
	if n := countCalls(log); n != 3 {
		t.Errorf("got %d calls, want the first read, the write of 539 bytes and recvfrom", n)
	}
}
