package quickstart

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Ports. Each engine adds its number, so that all ports of a deployment differ even if
// all engines share a host. The ranges fit MaxEngines engines of each role with MaxTP
// ranks, and are outside of Linux's default range of ephemeral ports (32768 to 60999).
const (
	proxyPort     = 8080
	prefillPort   = 8100
	decodePort    = 8200
	encodePort    = 8300
	sideChannel   = 5600  // NIXL: one port for each engine
	tierChannel   = 5710  // P2P tier: one port for each engine
	eventsPort    = 7100  // two ports for each engine: events, replay
	bootstrapPort = 8998  // one port for each prefill engine
	handshakePort = 6301  // MoRI-IO: one port for each rank
	notifyPort    = 61005 // MoRI-IO: one port for each rank
	lmcachePort   = 65432
)

// place creates the engines of p: their hosts, ports and GPUs.
func (p *Plan) place(o Options) {
	total := o.Prefill + o.Decode + o.Encode
	gpus := map[string]int{}
	for _, group := range []struct {
		role        string
		count, port int
	}{{config.RolePrefill, o.Prefill, prefillPort}, {config.RoleDecode, o.Decode, decodePort}, {config.RoleEncode, o.Encode, encodePort}} {
		for i := range group.count {
			n := len(p.Engines)
			host := p.hosts[n*len(p.hosts)/total]
			e := Engine{
				Name: fmt.Sprintf("%s-%d", group.role, i), Role: group.role, Host: host, Port: group.port + i,
				first: n, bind: bindAddress(host), gpus: gpuList(gpus[host], p.tp),
			}
			e.env("CUDA_VISIBLE_DEVICES", e.gpus)
			gpus[host] += p.tp
			p.Engines = append(p.Engines, e)
		}
	}
}

// gpuList lists count GPUs from the first.
func gpuList(first, count int) string {
	var list []string
	for i := range count {
		list = append(list, strconv.Itoa(first+i))
	}
	return strings.Join(list, ",")
}

// bindAddress returns the address for servers on host: the loopback address itself, and
// all addresses of any other host.
func bindAddress(host string) string {
	if netip.MustParseAddr(host).IsLoopback() {
		return host
	}
	return "0.0.0.0"
}

// port returns the port of e in a range with one port for each engine.
func (e *Engine) port(first int) int { return first + e.first }

// ranked returns the first port of e in a range with one port for each rank.
func (e *Engine) ranked(first int) int { return first + e.first*MaxTP }

// address is host:port of e.
func (e *Engine) address(port int) string { return net.JoinHostPort(e.Host, strconv.Itoa(port)) }

// env adds an environment variable.
func (e *Engine) env(name string, value any) {
	e.Env = append(e.Env, fmt.Sprintf("%s=%v", name, value))
}

// args adds arguments to the command.
func (e *Engine) args(args ...any) {
	for _, a := range args {
		e.Command = append(e.Command, fmt.Sprint(a))
	}
}

// key adds a key to the engine's table in the configuration.
func (e *Engine) key(name string, value any) {
	text := fmt.Sprint(value)
	if s, ok := value.(string); ok {
		text = quoteTOML(s)
	}
	e.keys = append(e.keys, name+" = "+text)
}

// config returns the configuration of the proxy.
func (p *Plan) config() string {
	var b strings.Builder
	listen := net.JoinHostPort(bindAddress(p.hosts[0]), strconv.Itoa(proxyPort))
	fmt.Fprintf(&b, "# pdproxy with %d engines of the quickstart %s.\n", len(p.Engines), p.Name)
	fmt.Fprintf(&b, "[server]\nlisten = %s\nexpose_placement = true # answers show their engines: x-pdproxy-flow\n", quoteTOML(listen))
	fmt.Fprint(&b, "\n[policy]\nplace = \"kv_aware\"\n")
	if len(p.top) > 0 {
		fmt.Fprintf(&b, "\n%s\n", strings.Join(p.top, "\n"))
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		fmt.Fprintf(&b, "\n[[engine]]\nname = %s\nurl = %s\nrole = %s\nconnector = %s\n",
			quoteTOML(e.Name), quoteTOML("http://"+e.address(e.Port)), quoteTOML(e.Role), quoteTOML(p.guide.connector))
		for _, k := range e.keys {
			fmt.Fprintln(&b, k)
		}
	}
	return b.String()
}

// quoteTOML writes s as a TOML string. No value of a plan has control characters.
func quoteTOML(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
