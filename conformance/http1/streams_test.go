package http1

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

var update = flag.Bool("update", false, "write the outcomes of testdata/streams.txt")

const streamsFile = "testdata/streams.txt"

// otherReader is the line before the outcome for server.http1 = "nethttp", if it is another one.
const otherReader = "\n-- nethttp\n"

// namedStream is one entry of testdata/streams.txt.
type namedStream struct {
	name, source string // source: the lines of the stream
	stream       []byte
	want         map[string]string // by the reader of HTTP/1.1
	comment      string            // before the next entry
}

func namedStreams(t testing.TB) (list []namedStream, head string) {
	t.Helper()
	text, err := os.ReadFile(streamsFile)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, _ := strings.Cut(string(text), "\n== ")
	names := map[string]bool{}
	for part := range strings.SplitSeq(rest, "\n== ") {
		var n namedStream
		n.name, part, _ = strings.Cut(part, "\n")
		n.source, part, _ = strings.Cut(part, "\n--\n")
		part, n.comment, _ = strings.Cut(part, "\n#")
		own, other, differs := strings.Cut(part, otherReader)
		if !differs {
			other = own
		}
		n.want = map[string]string{config.HTTP1Own: strings.TrimSpace(own), config.HTTP1NetHTTP: strings.TrimSpace(other)}
		if n.stream, err = unescape(n.source); err != nil || names[n.name] {
			t.Fatalf("%s: %v, or the second of the name", n.name, err)
		}
		names[n.name] = true
		list = append(list, n)
	}
	if len(list) < 200 {
		t.Fatalf("%s has %d entries", streamsFile, len(list))
	}
	return list, head
}

var repeated = regexp.MustCompile(`\{(\d+)\*([^{}]*)\}`)

// unescape returns the bytes of the lines of a stream.
func unescape(source string) ([]byte, error) {
	s := strings.ReplaceAll(strings.ReplaceAll(source, "\n", ""), `"`, `\"`)
	for repeated.MatchString(s) {
		s = repeated.ReplaceAllStringFunc(s, func(r string) string {
			m := repeated.FindStringSubmatch(r)
			n, _ := strconv.Atoi(m[1])
			return strings.Repeat(m[2], n)
		})
	}
	s, err := strconv.Unquote(`"` + s + `"`)
	return []byte(s), err
}

// TestStreams sends each named stream whole over a socket. The proxy makes of it what the file says,
// and that is for net/http and llhttp the same.
func TestStreams(t *testing.T) {
	list, head := namedStreams(t)
	eachReader(t, func(t *testing.T, reader string) { testStreams(t, reader, list) })
	for _, e := range exceptions {
		shown := func(n namedStream) bool {
			return slices.ContainsFunc(readers, func(r string) bool { return strings.HasSuffix(n.want[r], "exception: "+e.name) })
		}
		if !slices.ContainsFunc(list, shown) {
			t.Errorf("no stream shows the exception %s", e.name)
		}
	}
	if *update {
		write(t, list, head)
	}
}

func testStreams(t *testing.T, reader string, list []namedStream) {
	proxy, library := onSockets(t, proxyServer(reader)), onSockets(t, netHTTPServer)
	testbed.Parallel(len(list), 8, func(i int) {
		n := &list[i]
		l := readLLHTTP(t, n.stream)
		whole := mostRequests(n.stream, l)
		got, err := proxy.send(whole, n.stream)
		if err != nil {
			t.Errorf("%s: %v", n.name, err)
			return
		}
		var std observation
		if len(got.messages) > 0 {
			if std, err = library.send(len(libraryBodies(n.stream)), n.stream); err != nil {
				t.Errorf("%s: net/http: %v", n.name, err)
				return
			}
		}
		e, difference := judge(got, l, std)
		if difference != "" {
			t.Errorf("%s: %s", n.name, difference)
		}
		outcome := got.String()
		if e != nil {
			outcome += "\nexception: " + e.name
		}
		if outcome = abbreviate(outcome); outcome != n.want[reader] && !*update {
			t.Errorf("%s: the proxy makes of it\n%s\nwant\n%s", n.name, outcome, n.want[reader])
		}
		n.want[reader] = outcome
	})
}

// TestSplits sends each named stream byte by byte, and in two pieces that are cut at every byte. The
// outcome is the same as for the whole stream.
func TestSplits(t *testing.T) { eachReader(t, testSplits) }

func testSplits(t *testing.T, reader string) {
	proxy := inMemory(t, proxyServer(reader))
	list, _ := namedStreams(t)
	testbed.Parallel(len(list), 4, func(i int) {
		n := list[i]
		whole := mostRequests(n.stream, readLLHTTP(t, n.stream))
		want, _, _ := strings.Cut(n.want[reader], "\nexception: ")
		check := func(how string, pieces ...[]byte) {
			got, err := proxy.send(whole, pieces...)
			if err != nil {
				t.Errorf("%s, %s: %v", n.name, how, err)
			} else if outcome := abbreviate(got.String()); outcome != want {
				t.Errorf("%s, %s: the proxy makes of it\n%s\nwant\n%s", n.name, how, outcome, want)
			}
		}
		if len(n.stream) > 1000 { // too many splits
			check("whole", n.stream)
			return
		}
		var bytes [][]byte
		for at := range n.stream {
			bytes = append(bytes, n.stream[at:at+1])
			check(fmt.Sprintf("cut at %d", at), n.stream[:at], n.stream[at:])
		}
		check("byte by byte", bytes...)
	})
}

// abbreviate makes long repetitions of one letter readable.
func abbreviate(s string) string {
	return regexp.MustCompile(`a{40,}|X{40,}|v{40,}`).ReplaceAllStringFunc(s, func(r string) string { return fmt.Sprintf("{%d*%c}", len(r), r[0]) })
}

func write(t *testing.T, list []namedStream, head string) {
	var b strings.Builder
	b.WriteString(head)
	for _, n := range list {
		own, other := n.want[config.HTTP1Own], n.want[config.HTTP1NetHTTP]
		fmt.Fprintf(&b, "\n== %s\n%s\n--\n%s", n.name, n.source, own)
		if other != own {
			b.WriteString(otherReader + other)
		}
		b.WriteByte('\n')
		if n.comment != "" {
			fmt.Fprintf(&b, "\n#%s\n", strings.TrimRight(n.comment, "\n"))
		}
	}
	if err := os.WriteFile(streamsFile, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// FuzzStreams compares the proxy with net/http and llhttp on any bytes in two pieces.
func FuzzStreams(f *testing.F) {
	library := inMemory(f, netHTTPServer)
	var proxies []server
	for _, reader := range readers {
		proxies = append(proxies, inMemory(f, proxyServer(reader)))
	}
	list, _ := namedStreams(f)
	for _, n := range list {
		if len(n.stream) < 4<<10 {
			f.Add(n.stream, uint16(len(n.stream)/2))
		}
	}
	f.Fuzz(func(t *testing.T, s []byte, cut uint16) {
		if otherProtocol(s) || len(s) < len("PRI * HTTP/2.0") || len(s) > 16<<10 {
			return // net/http answers no shorter stream before the limit of a head
		}
		l := readLLHTTP(t, s)
		whole, at := mostRequests(s, l), min(int(cut), len(s))
		for _, proxy := range proxies {
			got, err := proxy.send(whole, s[:at], s[at:])
			if err != nil {
				t.Fatal(proxy.name, err)
			}
			if len(got.messages) == 0 {
				continue
			}
			std, err := library.send(len(libraryBodies(s)), s)
			if err != nil {
				t.Fatalf("net/http: %v", err)
			}
			if _, difference := judge(got, l, std); difference != "" {
				t.Fatal(proxy.name, difference)
			}
		}
	})
}
