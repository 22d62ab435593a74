package config

import (
	"strings"
	"testing"
)

// twoEngines is a valid pair. It has 10 lines. Tests append text to it and expect
// line numbers from 11 on.
const twoEngines = `[[engine]]
name = "p0"
url = "http://127.0.0.1:8100"
role = "prefill"
connector = "vllm-nixl"
[[engine]]
name = "d0"
url = "http://127.0.0.1:8200"
role = "decode"
connector = "vllm-nixl"
`

type want struct {
	key      string
	line     int
	fragment string
}

// problemCases lists bad configurations. Each has all of its problems, in order.
var problemCases = []struct {
	name string
	text string
	want []want
}{
	// Text that is no TOML.
	{"syntax", "[server]\nlisten = \n", []want{{"server.listen", 2, "invalid TOML: expected value"}}},
	{"syntax in line 1", "[server\n", []want{{"", 1, "invalid TOML"}}},
	{"duplicate key", "[server]\nlisten = 'a:1'\nlisten = 'a:2'\n", []want{{"server.listen", 3, "already"}}},
	{"table twice in the place of an array", "[engine]\nname = 'a'\n[engine]\nname = 'b'\n", []want{{"", 3, "already been defined; each entry of engine begins with [[engine]]"}}},
	{"table, then array", "[discovery.dns.engine]\nname = 'a'\n[[discovery.dns.engine]]\n", []want{{"discovery.dns", 3, "begins with [[discovery.dns.engine]]"}}},
	{"table twice", "[server]\n[server]\n", []want{{"", 2, "Key 'server' has already been defined"}}},
	{"string without quotes", "[policy]\nplace = least_load\n", []want{{"policy.place", 2, `found "least" instead; strings need quotes`}}},
	{"address without quotes", "[server]\nlisten = 127.0.0.1:8080\n", []want{{"server.listen", 2, "; strings need quotes"}}},
	{"path without quotes", "[server]\naccess_log = /var/log/a # b\n", []want{{"server.access_log", 2, "; strings need quotes"}}},
	{"duration without quotes", "[timeouts]\nprefill = 30s\n", []want{{"timeouts", 2, "; strings need quotes"}}},
	{"size without quotes", "[server]\nmax_body = 16 MiB\n", []want{{"server", 2, "; strings need quotes"}}},
	{"entry without quotes", "[server]\ntrusted_proxies = ['::1',\n lb]\n", []want{{"server.trusted_proxies", 3, "; strings need quotes"}}},
	{"label without quotes", "[[engine]]\nlabels = { zone = a }\n", []want{{"engine.labels.zone", 2, "; strings need quotes"}}},
	{"boolean of YAML", "[server]\nexpose_placement = yes\n", []want{{"server.expose_placement", 2, "; a boolean is true or false"}}},
	{"YAML", "# my proxy\n\nserver:\n  listen: 127.0.0.1:80\n", []want{{"", 3, "; the text looks like YAML, and TOML is expected"}}},
	{"YAML of one line", "listen: 127.0.0.1:80\n", []want{{"", 1, "; the text looks like YAML, and TOML is expected"}}},
	{"YAML with a mark", "---\nserver:\n", []want{{"", 1, "; the text looks like YAML, and TOML is expected"}}},
	{"list of YAML", "- name: p0\n  url: http://a\n", []want{{"", 1, "; the text looks like YAML, and TOML is expected"}}},
	{"JSON", "{\n \"server\": {}\n}\n", []want{{"", 1, "; the text looks like JSON, and TOML is expected"}}},
	{"colon in TOML", "[server]\nlisten: 'a:1'\n", []want{{"server", 2, `; TOML has "=" between key and value`}}},
	{"no UTF-8", "[server]\nlisten = \"\xff\"\n", []want{{"server.listen", 2, "UTF-8"}}},

	// Sets of scorers.
	{"weights", "[[scores]]\nname = 's'\n[[scores.scorer]]\nname = 'prefix'\nweight = -1\n[[scores.scorer]]\nname = 'queue'\nweight = 1e9\nleg = 'both'\n[[scores.scorer]]\nweight = nan\n", []want{
		{"scores[0].scorer[0].weight", 5, "must be from 0 to 1000000, found -1"}, {"scores[0].scorer[1].weight", 8, "found 1e+09"},
		{"scores[0].scorer[1].leg", 9, `must be one of "", "prefill", "decode", found "both"`}, {"scores[0].scorer[2].name", 10, "is required"}, {"scores[0].scorer[2].weight", 11, "found NaN"},
	}},
	{"scorers in a line", "[[scores]]\nname = 's'\nscorer = [\n { name = 'prefix' },\n { name = 'queue', weight = 'much', params = { a = true, b = 1, c = 'x' } },\n]\n", []want{
		{"scores[0].scorer[1].params.a", 5, "want float, found boolean"}, {"scores[0].scorer[1].weight", 5, "want float, found string"},
	}},
	{"names of sets", "[[scores]]\npicker = 'best'\n[[scores]]\nname = 's'\nclasses = ['no', '']\n[[scores]]\nname = 's'\nmodels = ['m', 'alias', '']\n[[model]]\nname = 'alias'\nalias_of = 'm'\n", []want{
		{"scores[0].name", 1, "is required"}, {"scores[0].picker", 2, `must be one of "max_score", "weighted_random", found "best"`}, {"scores[1].classes[0]", 5, `no [[priority_class]] has the name "no"`},
		{"scores[1].classes[1]", 5, `no [[priority_class]] has the name ""`}, {"scores[2].name", 7, `"s" is already the name of scores[1]`}, {"scores[2].models[1]", 8, `"alias" is a [[model]] that other models serve`}, {"scores[2].models[2]", 8, "is required"},
	}},
	{"parameters of a plugin's scorer", "[[plugin]]\nname = 'p'\npath = 'p.wasm'\n[[scores]]\nname = 's'\n[[scores.scorer]]\nname = 'p/mine'\nparams = { a = 1 }\n", []want{
		{"scores[0].scorer[0].params", 8, "is for built-in scorers: a plugin reads the key config of its [[plugin]]"},
	}},

	// Sleep.
	{"nobody waits for an engine that wakes", "[sleep]\nwake = true\n", []want{{"sleep.wake", 2, "needs limits.no_engine_timeout"}}},
	{"no reports of sleep", "[sleep]\nwake = true\n[limits]\nno_engine_timeout = '1m'\n[health]\nload_interval = '0s'\n", []want{{"sleep.wake", 2, "needs health.load_interval"}}},
	{"nobody wakes", "[sleep]\nafter = '1m'\n", []want{{"sleep.after", 2, "needs sleep.wake"}}},
	{"no time to wake", "[sleep]\ntimeout = '0s'\nafter = '-1s'\n", []want{{"sleep.timeout", 2, "more than 0"}, {"sleep.after", 3, "at least 0"}}},

	// Keys and types.
	{"unknown key", "[server]\nfoo = 1\n", []want{{"server.foo", 2, "unknown key"}}},
	{"misspelled key", "[server]\nhtttp3 = ':1'\n", []want{{"server.htttp3", 2, "unknown key, did you mean http3?"}}},
	{"key with another separator", "[server]\nmax-body = '1MiB'\n", []want{{`server.max-body`, 2, "did you mean max_body?"}}},
	{"misspelled policy", "[policy]\nplace = 'kvaware'\n", []want{{"policy.place", 2, `is named "kvaware", did you mean kv_aware? the built-in ones are`}}},
	{"unknown table", "\n[srv]\nlisten = ':1'\n", []want{{"srv", 2, "unknown key"}}},
	{"unknown root key", "listen = ':1'\n", []want{{"listen", 1, "unknown key at the top of the file: write it below its section, [server] or [admin] or [metrics] or [epp]"}}},
	{"unknown root key of no section", "colour = 1\n", []want{{"colour", 1, "unknown key"}}},
	{"unknown key is case sensitive", "[server]\nListen = ':1'\n", []want{{"server.Listen", 2, "unknown key"}}},
	{"unknown quoted key", "[server]\n\"a.b\" = 1\n", []want{{`server."a.b"`, 2, "unknown key"}}},
	{"encoder without vLLM", "[[engine]]\nname = 'e'\nurl = 'http://e'\nrole = 'encode'\nconnector = 'sglang'\n", []want{{"engine[0].role", 4, "is for connectors of vLLM"}}},
	{"labels that are no table", twoEngines + "labels = 'a'\n", []want{{"engine[1].labels", 11, "want table, found string"}}},
	{"label that is no text", twoEngines + "labels = { zone = 1 }\n", []want{{"engine[1].labels.zone", 11, "want string, found integer"}}},
	{"label with a bad name", twoEngines + "labels = { 'a=b' = 'c' }\n", []want{{"engine[1].labels", 11, "letters, digits"}}},
	{"label with a bad value", twoEngines + "labels = { zone = 'a b' }\n", []want{{"engine[1].labels", 11, `found "zone" = "a b"`}}},
	{"empty label", twoEngines + "labels = { zone = '' }\n", []want{{"engine[1].labels", 11, "1 to 63 bytes"}}},
	{"too many labels", twoEngines + "labels = { zone = '1', a = '1', b = '1', c = '1', d = '1', e = '1', f = '1' }\n", []want{{"engine[1].labels", 11, "at most 5 labels besides"}}},
	{"negative weight", twoEngines + "weight = -1\n", []want{{"engine[1].weight", 11, "must be 0 to 1000"}}},
	{"labels of pairs", twoEngines + "labels = { zone = 'a' }\n[pairs]\nsame_labels = ['zone', 'zone', '', 'a b']\n", []want{
		{"pairs.same_labels[1]", 13, "occurs twice"}, {"pairs.same_labels[2]", 13, "name of a label"}, {"pairs.same_labels[3]", 13, "name of a label"}}},
	{"engines without a label of pairs", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-nixl'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-nixl'\nlabels={zone='a'}\n" +
		"[[engine]]\nname='b'\nurl='http://b'\nrole='both'\nconnector='none'\n[pairs]\nsame_labels = ['zone']\n", []want{{"engine[0].labels", 2, "can never serve a request"}}},
	{"labels and weight", twoEngines + "labels = { zone = 'eu-1a', revision = '7', hardware = 'h100', a = '1', b = '1', c = '1', d = '1', e = '1' }\nweight = 2\n", nil},
	{"unknown key of an entry", twoEngines + "rank = 2\n", []want{{"engine[1].rank", 11, "unknown key"}}},
	{"unknown key of an inner table", "[discovery.kubernetes]\nname = 'x'\n", []want{{"discovery.kubernetes.name", 2, "unknown key"}}},
	{"several unknown keys in order", "[server]\nz = 1\na = 1\n", []want{{"server.z", 2, "unknown"}, {"server.a", 3, "unknown"}}},
	{"role without connector", "[[engine]]\nname = 'p'\nurl = 'http://h:1'\nrole = 'prefill'\n", []want{{"engine[0].connector", 2, `is missing: role "prefill" needs the connector of the engine, such as "vllm-nixl"`}}},
	{"role with connector none", "[[engine]]\nname = 'p'\nurl = 'http://h:1'\nrole = 'prefill'\nconnector = 'none'\n", []want{{"engine[0].connector", 5, `"none" transfers nothing`}}},
	{"string wanted", "[server]\nlisten = 8080\n", []want{{"server.listen", 2, "want string, found integer"}}},
	{"duration as number", "[timeouts]\nprefill = 120\n", []want{{"timeouts.prefill", 2, `want string such as "30s", found integer`}}},
	{"duration as float", "[timeouts]\nprefill = 1.5\n", []want{{"timeouts.prefill", 2, `want string such as "30s", found float`}}},
	{"duration without unit", "[timeouts]\nprefill = '120'\n", []want{{"timeouts.prefill", 2, `invalid duration "120"`}}},
	{"size as boolean", "[server]\nmax_body = true\n", []want{{"server.max_body", 2, `want string such as "16MiB", found boolean`}}},
	{"size in another unit", "[server]\nmax_body = '16MB'\n", []want{{"server.max_body", 2, `invalid size "16MB"`}}},
	{"integer wanted", "[limits]\nqueue = '10'\n", []want{{"limits.queue", 2, "want integer, found string"}}},
	{"integer as float", "[limits]\nqueue = 10.0\n", []want{{"limits.queue", 2, "want integer, found float"}}},
	{"float wanted", "[retry]\nbudget = '20%'\n", []want{{"retry.budget", 2, "want float, found string"}}},
	{"boolean wanted", "[server]\nexpose_placement = 'yes'\n", []want{{"server.expose_placement", 2, "want boolean, found string"}}},
	{"datetime", "[policy]\nplan = 1979-05-27\n", []want{{"policy.plan", 2, "want string, found datetime"}}},
	{"table wanted", "server = 1\n", []want{{"server", 1, "want table, found integer"}}},
	{"table for a key", "[server.listen]\na = 1\n", []want{{"server.listen", 1, "want string, found table"}}},
	{"array wanted", "[policy]\norder = 'auto'\n", []want{{"policy.order", 2, "want array, found string"}}},
	{"array for a key", "[policy]\nplan = ['auto']\n", []want{{"policy.plan", 2, "want string, found array"}}},
	{"array of tables wanted", "[engine]\nname = 'x'\n", []want{{"engine", 1, "want array of tables, [[engine]], found table"}}},
	{"array of tables for a table", "[[server]]\n", []want{{"server", 1, "want table, found array of tables"}}},
	{"entry of another type", "engine = [\n 1 ]\n", []want{{"engine[0]", 2, "want table, found integer"}, {"engine[0].name", 2, "required"},
		{"engine[0].role", 2, "required"}, {"engine[0].url", 2, "required"}}},
	{"string entry of another type", "[policy]\norder = [\n  1,\n]\n",
		[]want{{"policy.order[0]", 3, "want string, found integer"}}},

	// [server], [admin], [limits], [timeouts].
	{"http3 without TLS", "[server]\nhttp3 = ':8443'\n", []want{{"server.http3", 2, "needs TLS"}}},
	{"host with a port", "[admin]\nallowed_hosts = ['proxy.svc', 'proxy:9090', '']\n",
		[]want{{"admin.allowed_hosts[1]", 2, "without a port"}, {"admin.allowed_hosts[2]", 2, "without a port"}}},
	{"engine routes", "[server]\nengine_routes = ['/generative_scoring', '/cohere/v2/chat', '/v1/videos',\n 'x', '/', '/a/', '/a/../b', '/a?b', '/a b', '/v1/%73leep',\n '/v1/videos']\n",
		[]want{{"server.engine_routes[3]", 3, "exact path"}, {"server.engine_routes[4]", 3, "exact path"}, {"server.engine_routes[5]", 3, "exact path"}, {"server.engine_routes[6]", 3, "exact path"},
			{"server.engine_routes[7]", 3, "exact path"}, {"server.engine_routes[8]", 3, "exact path"}, {"server.engine_routes[9]", 3, "exact path"}, {"server.engine_routes[10]", 4, "listed twice"}}},
	{"management routes", "[server]\nengine_routes = ['/sleep',\n '/v1/load_lora_adapter']\n", []want{{"server.engine_routes[0]", 2, "must not reach"}, {"server.engine_routes[1]", 3, "must not reach"}}},
	{"routes of the proxy as engine routes", "[server]\nengine_routes = ['/v1/models', '/v1/models/a',\n '/v1/responses/a']\n",
		[]want{{"server.engine_routes[0]", 2, "of the proxy"}, {"server.engine_routes[1]", 2, "of the proxy"}, {"server.engine_routes[2]", 3, "of the proxy"}}},
	{"CORS origins", "[server]\ncors_origins = ['*', 'tauri://localhost', 'http://[::1]:8000',\n 'a.example',\n 'https://a.example/', 'null', 'https://A.example', 'https://a.example:443', 'https://u@a.example', '']\n",
		[]want{{"server.cors_origins[3]", 3, `found "a.example"`}, {"server.cors_origins[4]", 4, `found "https://a.example/"`}, {"server.cors_origins[5]", 4, `found "null"`},
			{"server.cors_origins[6]", 4, "as browsers send it"}, {"server.cors_origins[7]", 4, "as browsers send it"}, {"server.cors_origins[8]", 4, "as browsers send it"}, {"server.cors_origins[9]", 4, "as browsers send it"}}},
	{"trusted proxies", "[server]\ntrusted_proxies = ['10.0.0.0/8',\n 'lb', '::1', '0.0.0.0/0',\n '10.0.0.1:80']\n",
		[]want{{"server.trusted_proxies[1]", 3, `found "lb"`}, {"server.trusted_proxies[3]", 3, "trusts every client"}, {"server.trusted_proxies[4]", 4, "IP address or a network"}}},
	{"cert without key", "[server.tls]\ncert = 'c'\n", []want{{"server.tls.cert", 2, "needs server.tls.key"}}},
	{"key without cert", "[server.tls]\nkey = 'k'\n", []want{{"server.tls.key", 2, "needs server.tls.cert"}}},
	{"ACME without storage", "[server.acme]\ndomains = ['a.example.org']\n", []want{{"server.acme.storage", 1, "is required with server.acme.domains"}}},
	{"ACME with cert", "[server.tls]\nself_signed = true\n[server.acme]\ndomains = ['a.example.org']\nstorage = 's'\n", []want{{"server.acme.domains", 4, "must not be set together"}}},
	{"ACME with names that get no certificate", "[server.acme]\ndomains = ['*.example.org', '127.0.0.1', 'A.example.org', 'proxy', 'a.example.org', 'a.example.org', 'a..b']\nstorage = 's'\n", []want{
		{"server.acme.domains[0]", 2, "is a wildcard"}, {"server.acme.domains[1]", 2, "is an IP address"}, {"server.acme.domains[2]", 2, "DNS name in lower case"},
		{"server.acme.domains[3]", 2, "no public name"}, {"server.acme.domains[5]", 2, "is there twice"}, {"server.acme.domains[6]", 2, "DNS name"}}},
	{"ACME with wrong values", "[server]\nlisten = ':443'\n[server.acme]\ndomains = ['a.example.org']\nstorage = 's'\ndirectory = 'http://ca/dir'\nhttp_port = 443\neab_key_id = 'k'\n", []want{
		{"server.acme.directory", 6, "https URL"}, {"server.acme.http_port", 7, "also the port of server.listen"}, {"server.acme.eab_key_id", 8, "needs server.acme.eab_key_file"}}},
	{"self_signed with cert", "[server.tls]\ncert = 'c'\nkey = 'k'\nself_signed = true\n", []want{{"server.tls.self_signed", 4, "must not be set together"}}},
	{"client_ca without TLS", "[server.tls]\nclient_ca = 'c'\n", []want{{"server.tls.client_ca", 2, "needs TLS"}}},
	{"sizes of 0", "[server]\nmax_body = '0'\nmax_header = '0B'\n", []want{{"server.max_body", 2, "more than 0"}, {"server.max_header", 3, "more than 0"}}},
	{"server durations of 0", "[server]\nread_header_timeout = '0s'\nidle_timeout = ''\nwrite_timeout = '0s'\n",
		[]want{{"server.read_header_timeout", 2, "more than 0"}, {"server.idle_timeout", 3, "more than 0"}, {"server.write_timeout", 4, "more than 0"}}},
	{"limits of connections", "[limits]\nmax_connections = -1\nmax_connections_per_address = -2\n",
		[]want{{"limits.max_connections", 2, "at least 0"}, {"limits.max_connections_per_address", 3, "at least -1"}}},
	{"negative duration where 0 may be", "[server]\ndrain_timeout = '-1s'\n", []want{{"server.drain_timeout", 2, "must not be negative, found -1s"}}},
	{"negative duration where 0 may not be", "[timeouts]\ndial = '-1s'\n", []want{{"timeouts.dial", 2, "more than 0"}}},
	{"timeouts of 0", "[timeouts]\nprefill='0s'\nfirst_byte='0s'\nstream_idle='0s'\nhandshake='0s'\npolicy='0s'\ndial='0s'\ncleanup='0s'\n",
		[]want{{"timeouts.prefill", 2, "more than 0"}, {"timeouts.first_byte", 3, "more than 0"}, {"timeouts.stream_idle", 4, "more than 0"},
			{"timeouts.handshake", 5, "more than 0"}, {"timeouts.policy", 6, "more than 0"}, {"timeouts.dial", 7, "more than 0"}, {"timeouts.cleanup", 8, "more than 0"}}},
	{"limits", "[limits]\nmax_exchanges = 0\nqueue = -1\nper_client = -1\n",
		[]want{{"limits.max_exchanges", 2, "at least 1, found 0"}, {"limits.queue", 3, "at least 0"}, {"limits.per_client", 4, "at least 0"}}},
	{"queue without time", "[limits]\nqueue_timeout = '0s'\n", []want{{"limits.queue_timeout", 2, "more than 0"}}},
	{"admin without token", "[admin]\nlisten = '0.0.0.0:9090'\n", []want{{"admin.listen", 2, "needs admin.token_file"}}},
	{"admin on every address without token", "[admin]\nlisten = ':9090'\n", []want{{"admin.listen", 2, "needs admin.token_file"}}},
	{"admin on a name without token", "[admin]\nlisten = 'box:9090'\n", []want{{"admin.listen", 2, "needs admin.token_file"}}},
	{"admin without address", "[admin]\nlisten = ''\n", []want{{"admin.listen", 2, "want host:port"}}},
	{"address without port", "[server]\nlisten = '127.0.0.1'\n", []want{{"server.listen", 2, "want host:port"}}},
	{"address with a port too large", "[server]\nlisten = '127.0.0.1:65536'\n", []want{{"server.listen", 2, "from 0 to 65535"}}},
	{"address with a named port", "[server]\nlisten = '127.0.0.1:http'\n", []want{{"server.listen", 2, "from 0 to 65535"}}},
	{"address with a scheme", "[server]\nlisten = '//x:80'\n", []want{{"server.listen", 2, "neither an IP address nor a name"}}},
	{"address with a bad IPv6", "[server]\nlisten = '[::zz]:80'\n", []want{{"server.listen", 2, "neither an IP address nor a name"}}},
	{"bad http3 address", "[server]\nhttp3 = 'x'\ntls.self_signed = true\n", []want{{"server.http3", 2, "want host:port"}}},
	{"one address twice", "[server]\nlisten = '127.0.0.1:9090'\n", []want{{"server.listen", 2, `"127.0.0.1:9090" is already used by admin.listen, whose default is "127.0.0.1:9090"`}}},
	{"every address and one of them", "[server]\nlisten = ':9090'\n[admin]\nlisten = 'localhost:9090'\n", []want{{"admin.listen", 4, "used by server.listen"}}},

	// [[tenant]] and [[jwt]].
	{"tenant without a name", "[[tenant]]\nweight = 0\n", []want{{"tenant[0].name", 1, "is required"}, {"tenant[0].weight", 2, "more than 0, found 0"}}},
	{"tenant with wrong values", "[[tenant]]\nname = 'a b'\nclass = '/'\nweight = -1\nmodels = ['', 'a b']\nrequests_per_minute = -1\ntokens_per_minute = 10000000001\nmax_exchanges = 2147483648\n",
		[]want{{"tenant[0].name", 2, "invalid name"}, {"tenant[0].class", 3, "invalid name"}, {"tenant[0].weight", 4, "more than 0"}, {"tenant[0].models[0]", 5, "is required"}, {"tenant[0].models[1]", 5, "without spaces"},
			{"tenant[0].requests_per_minute", 6, "from 0 to 10000000000"}, {"tenant[0].tokens_per_minute", 7, "from 0 to 10000000000"}, {"tenant[0].max_exchanges", 8, "from 0 to 2147483647"}}},
	{"tenant with wrong types", "[[tenant]]\nname = 'a'\nweight = nan\nrequests_per_minute = 1.5\ntokens_per_minute = '5'\nrpm = 1\n",
		[]want{{"tenant[0].weight", 3, "more than 0, found NaN"}, {"tenant[0].requests_per_minute", 4, "want integer"}, {"tenant[0].tokens_per_minute", 5, "want integer"}, {"tenant[0].rpm", 6, "unknown key"}}},
	{"two tenants of one name", "[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'\n", []want{{"tenant[1].name", 4, "already the name of tenant[0]"}}},
	{"empty jwt", "[[jwt]]\n", []want{{"jwt[0].audience", 1, "is required"}, {"jwt[0].issuer", 1, "is required"}, {"jwt[0].jwks_url", 1, "is required, or jwks_file"}, {"jwt[0].tenant", 1, "is required, or tenant_claim"}}},
	{"jwt with contradictions", "[[tenant]]\nname = 't'\n[[jwt]]\nissuer = 'i'\naudience = 'a'\njwks_url = 'https://i/k'\njwks_file = 'k'\njwks_refresh = '1s'\ntenant = 't'\ntenant_claim = 'c'\n",
		[]want{{"jwt[0].jwks_file", 7, "must not be set together"}, {"jwt[0].jwks_refresh", 8, "at least 10s"}, {"jwt[0].tenant_claim", 10, "must not be set together"}}},
	{"jwt without encryption, unknown tenant", "[[jwt]]\nissuer = 'i'\naudience = 'a'\njwks_url = 'http://10.0.0.1/k'\ntenant = 't'\n", []want{{"jwt[0].jwks_url", 4, "must be https"}, {"jwt[0].tenant", 5, "no [[tenant]] is named"}}},
	{"two jwts of one issuer, bad URL", "[[jwt]]\nissuer = 'i'\naudience = 'a'\njwks_file = 'k'\ntenant_claim = 't'\n[[jwt]]\nissuer = 'i'\naudience = 'a'\njwks_url = 'https://u:p@i/k'\ntenant_claim = 't'\n",
		[]want{{"jwt[1].issuer", 7, "already the name of jwt[0]"}, {"jwt[1].jwks_url", 9, "must not contain a user"}}},

	// [policy].
	{"policy names", "[policy]\nplan = 'x'\nplace = ''\nmint = 'auto'\nruntime = 'v8'\n",
		[]want{{"policy.plan", 2, `named "x"`}, {"policy.place", 3, `named ""`}, {"policy.mint", 4, `named "auto"`}, {"policy.runtime", 5, `one of "wasm", "native"`}}},
	{"order", "[policy]\norder = ['always',\n 'no',\n 'always']\n", []want{
		{"policy.order[1]", 3, `named "no"`}, {"policy.order[2]", 4, "twice"}}},

	// [conversation].
	{"conversation", "[conversation]\nfields = ['a',\n 'a..b']\nheaders = ['X-A', 'X B']\nparent_headers = ['']\nlate_fields = ['']\ncapacity = 0\n", []want{
		{"conversation.fields[1]", 3, `path "a..b"`}, {"conversation.headers[1]", 4, `found "X B"`}, {"conversation.parent_headers[0]", 5, "name of a header"}, {"conversation.late_fields[0]", 6, "path"}, {"conversation.capacity", 7, "from 1"}}},

	// [[engine]].
	{"empty engine", "\n[[engine]]\n", []want{{"engine[0].name", 2, "is required"}, {"engine[0].role", 2, "is required"}, {"engine[0].url", 2, "is required"}}},
	{"one name twice", strings.Replace(twoEngines, "d0", "p0", 1), []want{{"engine[1].name", 7, `"p0" is already the name of engine[0]`}}},
	{"bad name", strings.Replace(twoEngines, "p0", "a/b", 1), []want{{"engine[0].name", 2, "invalid name"}}},
	{"bad first character", strings.Replace(twoEngines, "p0", ".p", 1), []want{{"engine[0].name", 2, "invalid name"}}},
	{"url scheme", strings.Replace(twoEngines, "http://127.0.0.1:8100", "127.0.0.1:8100", 1), []want{{"engine[0].url", 3, "invalid URL"}}},
	{"url other scheme", strings.Replace(twoEngines, "http://127.0.0.1:8100", "grpc://h:1", 1), []want{{"engine[0].url", 3, "scheme must be"}}},
	{"url host", strings.Replace(twoEngines, "http://127.0.0.1:8100", "http://:8100", 1), []want{{"engine[0].url", 3, "no host"}}},
	{"url port", strings.Replace(twoEngines, "8100", "81000", 1), []want{{"engine[0].url", 3, "port"}}},
	{"url empty port", strings.Replace(twoEngines, ":8100", ":", 1), []want{{"engine[0].url", 3, "port"}}},
	{"url query", strings.Replace(twoEngines, ":8100", ":8100/?a=b", 1), []want{{"engine[0].url", 3, "no query"}}},
	{"url empty query", strings.Replace(twoEngines, ":8100", ":8100/?", 1), []want{{"engine[0].url", 3, "no query"}}},
	{"url fragment", strings.Replace(twoEngines, ":8100", ":8100/#a", 1), []want{{"engine[0].url", 3, "no query or fragment"}}},
	{"url empty fragment", strings.Replace(twoEngines, ":8100", ":8100/#", 1), []want{{"engine[0].url", 3, "no query or fragment"}}},
	{"url password", strings.Replace(twoEngines, "127.0.0.1:8100", "u:hunter2@h:8100", 1), []want{{"engine[0].url", 3, "user or password"}}},
	{"role", strings.Replace(twoEngines, `"prefill"`, `"context"`, 1), []want{{"engine[0].role", 4, `found "context"`}}},
	{"connector", strings.Replace(twoEngines, `"vllm-nixl"`, `"nixl"`, 1),
		[]want{{"engine[0].connector", 5, `found "nixl", did you mean vllm-nixl?`}}},
	{"connectors that cannot pair", strings.Replace(twoEngines, `"vllm-nixl"`, `"sglang"`, 1),
		[]want{{"engine[0].connector", 5, `"sglang" cannot pair with d0 ("vllm-nixl")`}}},
	{"third engine that cannot pair", twoEngines + "[[engine]]\nname='d1'\nurl='http://d1'\nrole='decode'\nconnector='trtllm'\n",
		[]want{{"engine[2].connector", 15, `"trtllm" cannot pair with p0`}}},
	{"connector none with a phase", strings.Replace(twoEngines, `"vllm-nixl"`, `"none"`, 1),
		[]want{{"engine[0].connector", 5, `needs role "both"`}}},
	{"connector left out with a phase", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\n", []want{{"engine[0].connector", 2, `needs role "both"`}}},
	{"numbers", twoEngines + "ranks = 0\nmax_conns = -1\nbootstrap_port = 70000\nblock_tokens = -16\n",
		[]want{{"engine[1].ranks", 11, "at least 1"}, {"engine[1].max_conns", 12, "at least 0"}, {"engine[1].bootstrap_port", 13, "from 0 to 65535"}, {"engine[1].block_tokens", 14, "from 0 to 1048576"}}},
	{"other engine keys", twoEngines + "bootstrap_host = 'h:1'\nhealth_path = 'health'\nwire = 'g4'\n",
		[]want{{"engine[1].bootstrap_host", 11, "host name"}, {"engine[1].health_path", 12, "begin with /"}, {"engine[1].wire", 13, `found "g4"`}}},
	{"kv events", twoEngines + "kv_events = 'poll'\nkv_replay = 'tcp://h'\n",
		[]want{{"engine[1].kv_events", 11, `"poll" is for connector "trtllm" only`}, {"engine[1].kv_replay", 12, "want tcp://host:port"}}},

	// [policy] params, [kv_index], [tokens], [recording].
	{"params", "policy.params = 1\n", []want{{"policy.params", 1, "want table, found integer"}}},
	{"one parameter", "[policy.params.kv_aware]\nqueue_weight = 'x'\n", []want{{"policy.params.kv_aware.queue_weight", 2, "want float, found string"}}},
	{"parameters of labels", "[policy.params.kv_aware]\nlabel_micros.zone = 2\nlabel_micros.'a/b' = 0.5\n", nil},
	{"a parameter of a label that is no number", "[policy.params.kv_aware]\nlabel_micros = { zone = 'x' }\n", []want{{"policy.params.kv_aware.label_micros.zone", 2, "want float, found string"}}},
	{"parameters that are too deep", "[policy.params.kv_aware]\nlabel_micros.a.b = 1\n", []want{{"policy.params.kv_aware.label_micros.a", 2, "want float, found table"}}},
	{"a policy that is no table", "[policy.params]\nkv_aware = 1\n", []want{{"policy.params.kv_aware", 2, "want table, found integer"}}},
	{"whole parameter", "[policy.params.kv_aware]\nqueue_weight = 2\n", nil},
	{"kv index", "[kv_index]\nmax_entries = 0\ntext_tokens = -1\n",
		[]want{{"kv_index.max_entries", 2, "at least 1"}, {"kv_index.text_tokens", 3, "at least 0"}}},
	{"tokens", "[tokens]\nsources = ['client', 'guess']\ntimeout = '0s'\n[tokens.files]\n'a b' = 'x.json'\n",
		[]want{{"tokens.sources[1]", 2, `found "guess"`}, {"tokens.timeout", 3, "more than 0"}}},
	{"recording", "[recording]\nblock_tokens = 0\n", []want{{"recording.block_tokens", 2, "from 1"}}},
	{"inline engines", "engine = [\n {name='a', url='http://a', role='both'},\n {name='a', url='http://b', role='both'},\n]\n",
		[]want{{"engine[1].name", 3, "already the name of engine[0]"}}},

	// [health], [retry], [circuit], [transport].
	{"health", "[health]\ninterval='0s'\ntimeout='0s'\nunhealthy_after=0\nhealthy_after=0\n",
		[]want{{"health.interval", 2, "more than 0"}, {"health.timeout", 3, "more than 0"}, {"health.unhealthy_after", 4, "at least 1"}, {"health.healthy_after", 5, "at least 1"}}},
	{"storage that is open", "[discovery.trtllm]\ncluster_uri='http://10.0.0.1:1'\n", []want{{"discovery.trtllm.cluster_uri", 2, "needs discovery.trtllm.token_file"}}},
	{"storage on the public port", "server.listen='127.0.0.1:8080'\ndiscovery.trtllm.cluster_uri='http://127.0.0.1:8080'\n", []want{{"discovery.trtllm.cluster_uri", 2, "differ from server.listen"}}},
	{"storage on the admin port", "admin.listen='127.0.0.1:9090'\ndiscovery.trtllm.cluster_uri='http://127.0.0.1:9090'\n", []want{{"discovery.trtllm.cluster_uri", 2, "differ from admin.listen"}}},
	{"retry", "[retry]\nattempts=0\nbudget=-0.1\nmin_budget=-1\n[trtllm]\nschedule_style='x'\n",
		[]want{{"retry.attempts", 2, "at least 1"}, {"retry.budget", 3, "from 0 to 1"}, {"retry.min_budget", 4, "at least 0"}, {"trtllm.schedule_style", 6, `found "x"`}}},
	{"budget that is no number", "[retry]\nbudget=nan\n", []want{{"retry.budget", 2, "from 0 to 1, found NaN"}}},
	{"circuit", "[circuit]\nfailures=0\nopen_for='0s'\n", []want{{"circuit.failures", 2, "at least 1"}, {"circuit.open_for", 3, "more than 0"}}},
	{"retired keys", "[pairs]\nwarm_up_interval='1s'\n[kv_index]\nexpect='1s'\ntext_ttl='1m'\n[tokens]\ncache_tokens=0\n[[plugin]]\nname='p'\npath='p.wasm'\nphase='filter'\nmemory_total='1GiB'\ncrash_cpu_share=0.5\n",
		[]want{{"pairs.warm_up_interval", 2, "always 100ms"}, {"kv_index.expect", 4, "always 30s"}, {"kv_index.text_ttl", 5, "always 10m"}, {"tokens.cache_tokens", 7, "always 4194304"}, {"plugin[0].memory_total", 12, "always memory"}, {"plugin[0].crash_cpu_share", 13, "always 0.1"}}},
	{"transport", "[transport]\nmax_idle=-1\nidle_timeout='0s'\n",
		[]want{{"transport.max_idle", 2, "at least 0"}, {"transport.idle_timeout", 3, "more than 0"}}},

	// [[plugin]] and [[upstream]].
	{"empty plugin", "[[plugin]]\n", []want{{"plugin[0].name", 1, "required"}, {"plugin[0].path", 1, "required"}}},
	{"plugin keys", `[[plugin]]
name = "p"
path = "p.wasm"
sha256 = "abc"
phase = "both"
fail = "shut"
header_stop = "body"
memory = "1KiB"
crash_budget = -1
crash_window = "0s"
timeout = "-1s"
upstreams = ["auth"]
host_functions = [""]
`, []want{
		{"plugin[0].sha256", 4, "64 hex"}, {"plugin[0].phase", 5, "one of"}, {"plugin[0].fail", 6, `found "shut"`},
		{"plugin[0].header_stop", 7, "one of"}, {"plugin[0].memory", 8, "64KiB to 4GiB, found 1KiB"}, {"plugin[0].crash_budget", 9, "at least 0"},
		{"plugin[0].crash_window", 10, "more than 0"}, {"plugin[0].timeout", 11, "negative"}, {"plugin[0].upstreams[0]", 12, "no [[upstream]]"},
		{"plugin[0].host_functions[0]", 13, "required"}}},
	{"artifact and signature", "[[plugin]]\nname='p'\npath='oci://ghcr.io/a/p'\npublic_key='RW'\n[[plugin]]\nname='q'\npath='oci://:1'\nsignature='q.minisig'\n" +
		"[[plugin]]\nname='r'\npath='r'\npublic_key='RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3'\nsignature='oci://ghcr.io/a/p:1'\n", []want{
		{"plugin[0].path", 3, "oci://REGISTRY/REPOSITORY:TAG"}, {"plugin[0].public_key", 4, "is not a public key of minisign"},
		{"plugin[1].path", 7, "@sha256:DIGEST"}, {"plugin[1].signature", 8, "needs public_key"}, {"plugin[2].signature", 13, "a part of the artifact"}}},
	{"built-in filters", "[[plugin]]\nname='p'\npath='builtin:stable_prefix'\nphase='filter'\n[[plugin]]\nname='q'\npath='builtin:stable-prefx'\n" +
		"[[plugin]]\nname='r'\npath='builtin:stable_prefix'\nsha256='" + strings.Repeat("0a", 32) + "'\npublic_key='RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3'\n", []want{
		{"plugin[1].path", 7, "did you mean stable_prefix?"}, {"plugin[2].phase", 9, `must be "filter"`},
		{"plugin[2].sha256", 11, "comes with the program"}, {"plugin[2].public_key", 12, "comes with the program"}}},
	{"sha256 that is no hex", "[[plugin]]\nname='p'\npath='p'\nsha256='" + strings.Repeat("zz", 32) + "'\n",
		[]want{{"plugin[0].sha256", 4, "64 hex"}}},
	{"fail on a policy", "[[plugin]]\nname='p'\npath='p'\nfail='open'\n", []want{{"plugin[0].fail", 4, "filters only"}}},
	{"two plugins of one name", "[[plugin]]\nname='p'\npath='p'\n[[plugin]]\nname='p'\npath='q'\n",
		[]want{{"plugin[1].name", 5, "already the name of plugin[0]"}}},
	{"filter named as a policy", "[policy]\nplace='f'\n[[plugin]]\nname='f'\npath='f'\nphase='filter'\nfail='open'\n",
		[]want{{"policy.place", 2, "is a filter"}}},
	{"policy plugin", "[policy]\nplace='f'\n[[plugin]]\nname='f'\npath='f'\n", nil},
	{"policy of a plugin", "[policy]\nplan='f/x'\nplace='f/y'\norder=['f/z','auto']\n[[plugin]]\nname='f'\npath='f'\n", nil},
	{"plugin with a built-in's name", "[policy]\nplace='kv_aware'\n[[plugin]]\nname='kv_aware'\npath='f'\n", nil},
	{"policy of no plugin", "[policy]\nplan='g/x'\nplace='f/'\n[[plugin]]\nname='f'\npath='f'\n",
		[]want{{"policy.plan", 2, `named "g"`}, {"policy.place", 3, "after the slash"}}},
	{"policy of a filter", "[policy]\nplan='f/x'\n[[plugin]]\nname='f'\npath='f'\nphase='filter'\n", []want{{"policy.plan", 2, "is a filter"}}},
	{"remote module", "[[plugin]]\nname='f'\npath='https://h/m.wasm'\n[[plugin]]\nname='g'\npath='http://u:p@h/m'\n",
		[]want{{"plugin[1].path", 6, "user or password"}}},
	{"canary", "[[plugin]]\nname='f'\npath='f'\ncanary=1.5\n[[plugin]]\nname='g'\npath='g'\nphase='filter'\ncanary=0.5\n",
		[]want{{"plugin[0].canary", 4, "from 0 to 1"}, {"plugin[1].canary", 9, "policies only"}}},
	{"upstreams", "[[upstream]]\nname='a'\nurl='http://a'\n[[upstream]]\nname='a'\nurl='a'\n[[upstream]]\nname='b c'\nurl='http://a'\n[[upstream]]\n",
		[]want{{"upstream[1].name", 5, "already"}, {"upstream[1].url", 6, "scheme"}, {"upstream[2].name", 8, "invalid name"},
			{"upstream[3].name", 10, "required"}, {"upstream[3].url", 10, "required"}}},
	{"models", "[[model]]\nname='a'\nalias_of='b'\n[[model]]\nname='a'\nalias_of='a'\n[[model]]\nname='b c'\nalias_of='d e'\n[[model]]\n" +
		"[[model]]\nname='e'\nalias_of='f'\nsplit={g=1}\n[[model]]\nname='" + strings.Repeat("n", 257) + "'\nalias_of='b'\n", []want{
		{"model[1].name", 5, "already"}, {"model[1].alias_of", 6, "another model than name"}, {"model[2].name", 8, "invalid name"},
		{"model[2].alias_of", 9, "invalid name"}, {"model[3].alias_of", 10, "is required, or split, or fallback"}, {"model[3].name", 10, "required"},
		{"model[4].split", 14, "together with alias_of"}, {"model[5].name", 16, "at most 256 bytes"}}},
	{"splits", "[[model]]\nname='a'\nsplit={b=-1}\n[[model]]\nname='c'\nsplit={d=0, c=0}\n[[model]]\nname='e'\nsplit={f=nan}\n[[model]]\nname='g'\nsplit={h=inf}\n" +
		"[[model]]\nname='i'\nsplit={j=1}\n[[model]]\nname='j'\nalias_of='k'\n[[model]]\nname='k'\nsplit={k=1,l=1}\n[[model]]\nname='m'\nsplit={''=1}\n" +
		"[[model]]\nname='o'\nsplit={a1=1,a2=1,a3=1,a4=1,a5=1,a6=1,a7=1,a8=1,a9=1,a10=1,a11=1,a12=1,a13=1,a14=1,a15=1,a16=1,a17=1}\n", []want{
		{"model[0].split.b", 3, "weight of 0 or more"}, {"model[1].split", 6, "above 0"}, {"model[2].split.f", 9, "found NaN"},
		{"model[3].split.h", 12, "found +Inf"}, {"model[4].split.j", 15, "has a split itself"}, {`model[7].split.""`, 24, "required"}, {"model[8].split", 27, "at most 16"}}},
	{"fallbacks", "[[model]]\nname='a'\nfallback=['a','b','b','s','t','','x y']\n[[model]]\nname='s'\nsplit={u=1}\n[[model]]\nname='t'\nalias_of='s'\n" +
		"[[model]]\nname='m'\nfallback=['1','2','3','4','5','6','7','8','9']\n[[model]]\nname='e'\nfallback=[]\n", []want{
		{"model[0].fallback[0]", 3, "another model than name"}, {"model[0].fallback[2]", 3, "twice"}, {"model[0].fallback[3]", 3, "has a split"},
		{"model[0].fallback[4]", 3, "has a split"}, {"model[0].fallback[5]", 3, "required"}, {"model[0].fallback[6]", 3, "invalid name"},
		{"model[3].fallback", 12, "at most 8"}, {"model[4].alias_of", 14, "required"}}},
	{"remotes", "[[remote]]\nname='a'\nurl='http://api.example.com'\nmodel='m'\n[[remote]]\nname='a'\nurl='https://api.example.com/v1/'\n[[remote]]\nname='b c'\nurl='ftp://x'\nmodel='m'\n[[remote]]\n" +
		"[[model]]\nname='m'\nfallback=['remote:a', 'remote:none']\n[[model]]\nname='remote:a'\nalias_of='remote:a'\n[[model]]\nname='n'\nalias_of='remote:a'\n[[engine]]\nname='remote:a'\nurl='http://e'\nrole='both'\nconnector='remote'\n", []want{
		{"remote[0].url", 3, "must be https"}, {"remote[1].model", 6, "required"}, {"remote[1].name", 6, "already"}, {"remote[1].url", 7, "must not end with /v1"},
		{"remote[2].name", 9, "invalid name"}, {"remote[2].url", 10, "http or https"}, {"remote[3].model", 12, "required"}, {"remote[3].name", 12, "required"}, {"remote[3].url", 12, "required"},
		{"model[0].fallback[1]", 15, `no [[remote]] is named "none"`}, {"model[1].name", 17, "must not begin"}, {"model[1].alias_of", 18, "another model than name"}, {"model[2].alias_of", 21, "only for fallback"},
		{"engine[0].name", 23, "must not begin"}, {"engine[0].connector", 26, "must be one of"}}},
	{"continuation", "[retry]\ncontinue='always'\ncontinue_tokens=0\n[[model]]\nname='a'\ncontinue='yes'\n[[model]]\nname='b'\ncontinue='off'\n", []want{
		{"retry.continue", 2, "must be one of"}, {"retry.continue_tokens", 3, "at least 1"}, {"model[0].continue", 6, "must be one of"}}},
	{"cycles of models", "[[model]]\nname='a'\nalias_of='b'\n[[model]]\nname='b'\nalias_of='c'\n[[model]]\nname='c'\nalias_of='a'\n" +
		"[[model]]\nname='d'\nsplit={e=1}\n[[model]]\nname='e'\nalias_of='f'\n[[model]]\nname='f'\nalias_of='e'\n", []want{
		{"model[0].alias_of", 3, `leads back to "a"`}, {"model[3].split", 12, "leads back"}}},

	// [discovery], [fleet], [sidecar].
	{"discovery", `[discovery.moriio]
listen = "127.0.0.1:36367"
[discovery.trtllm]
cluster_uri = "127.0.0.1:2379"
metadata_uri = "http://127.0.0.1:2379"
refresh_interval = "0s"
[discovery.etcd]
endpoints = ["http://e0:2379", "e1:2379"]
prefix = ""
`, []want{
		{"discovery.moriio.listen", 2, "want tcp://host:port"},
		{"discovery.trtllm.cluster_uri", 4, "want etcd://host:port or http://host:port"},
		{"discovery.trtllm.metadata_uri", 5, "want etcd://host:port"},
		{"discovery.trtllm.refresh_interval", 6, "more than 0"},
		{"discovery.etcd.endpoints[1]", 8, "invalid URL"},
		{"discovery.etcd.prefix", 9, "required"}}},
	{"discovery.allow", "[discovery]\nallow = ['10.0.0.0/8', '10.1.0.0/8', 'fd00::/8', '::1', '.svc', 'h', '', '.', 'a b', 'h:1']\n", []want{
		{"discovery.allow[1]", 2, "invalid network"}, {"discovery.allow[6]", 2, "host name"}, {"discovery.allow[7]", 2, "host name"},
		{"discovery.allow[8]", 2, "host name"}, {"discovery.allow[9]", 2, "host name"}}},
	{"halves of etcd's keys", "[discovery.etcd]\nusername='u'\nkey='k'\n",
		[]want{{"discovery.etcd.username", 2, "needs discovery.etcd.password_file"}, {"discovery.etcd.key", 3, "needs discovery.etcd.cert"}}},
	{"two stores of a cluster", "[discovery.trtllm]\ncluster_uri = 'etcd://e:1,http://h:2'\ncluster_name = 'a/b'\n",
		[]want{{"discovery.trtllm.cluster_uri", 2, "must be the only address"}, {"discovery.trtllm.cluster_name", 3, "contain /"}}},
	{"discovery.sglang", `[discovery.sglang]
interval = '0s'
[[discovery.sglang.engine]]
name = 'a'
url = 'http://10.0.0.5:8998'
role = 'decode'
connector = 'vllm-nixl'
bootstrap_port = 7
`, []want{
		{"discovery.sglang.interval", 2, "more than 0"}, {"discovery.sglang.engine[0].role", 6, "must be \"prefill\""},
		{"discovery.sglang.engine[0].connector", 7, "must be \"sglang\""}, {"discovery.sglang.engine[0].bootstrap_port", 8, "url contains it"}}},
	{"discovery.dns", `[discovery.dns]
interval = "0s"
server = "ns"
family = "5"
[[discovery.dns.engine]]
name = "a"
url = "http://10.0.0.1:8000"
role = "both"
kv_events = "tcp://*:5557"
[[discovery.dns.engine]]
name = "a"
url = "http://_http._tcp.a.svc:80"
role = "decode"
connector = "vllm-other"
kv_replay = "tcp://*"
`, []want{
		{"discovery.dns.interval", 2, "more than 0"}, {"discovery.dns.server", 3, "want host:port"}, {"discovery.dns.family", 4, "one of"},
		{"discovery.dns.engine[0].url", 7, "not an address"}, {"discovery.dns.engine[1].name", 11, "already the name of discovery.dns.engine[0]"},
		{"discovery.dns.engine[1].url", 12, "no port"}, {"discovery.dns.engine[1].connector", 14, "one of"},
		{"discovery.dns.engine[1].kv_replay", 15, "want tcp://host:port"}}},
	{"discovery.kubernetes", `[discovery.kubernetes]
api = 'http://k8s.lab:6443'
token_file = '/t'
[[discovery.kubernetes.engine]]
name = 'p'
url = 'http://10.0.0.1:8000'
role = 'prefill'
connector = 'vllm-nixl'
[[discovery.kubernetes.engine]]
name = 'p'
url = 'http://_http._tcp.p'
role = 'prefill'
connector = 'vllm-other'
kv_events = 'tcp://*:5557'
kv_replay = '*:5558'
`, []want{
		{"discovery.kubernetes.token_file", 3, "without encryption"}, {"discovery.kubernetes.engine[0].url", 6, "name of a Service"},
		{"discovery.kubernetes.engine[1].name", 10, "already the name of discovery.kubernetes.engine[0]"},
		{"discovery.kubernetes.engine[1].url", 11, "name of a Service"}, {"discovery.kubernetes.engine[1].connector", 13, "one of"},
		{"discovery.kubernetes.engine[1].kv_replay", 15, "want tcp://host:port"}}},
	{"discovery.kubernetes.pool", "[[discovery.kubernetes.engine]]\nname='p'\nurl='http://p.llm'\nrole='both'\n[[discovery.kubernetes.pool]]\nname='p'\nurl='http://10.0.0.1'\nrole='boss'\n", []want{
		{"discovery.kubernetes.pool[0].name", 6, "already the name of discovery.kubernetes.engine[0]"}, {"discovery.kubernetes.pool[0].url", 7, "name of an InferencePool"},
		{"discovery.kubernetes.pool[0].role", 8, "one of"}}},
	{"discovery.kubernetes over loopback", "[discovery.kubernetes]\napi='http://127.0.0.1:8001'\ntoken_file='/t'\n[[discovery.kubernetes.engine]]\nname='p'\nurl='http://p.llm.svc.cluster.local'\nrole='both'\n", nil},
	{"registry for all", "[discovery.moriio]\nlisten='tcp://*:36367'\n", []want{{"discovery.moriio.listen", 2, "or discovery.moriio.open"}}},
	{"registry with a password", "[discovery.moriio]\nlisten='tcp://*:36367'\npassword_file='p'\n", nil},
	{"registry of own hosts", "[discovery.moriio]\nlisten='tcp://*:36367'\nown_host=true\n", []want{{"discovery.moriio.listen", 2, "own_host with discovery.allow"}}},
	{"registry of own, allowed hosts", "[discovery]\nallow=['10.0.0.0/8']\n[discovery.moriio]\nlisten='tcp://*:36367'\nown_host=true\n", nil},
	{"registry opened", "[discovery.moriio]\nlisten='tcp://*:36367'\nopen=true\n", nil},
	{"registry on loopback", "[discovery.moriio]\nlisten='tcp://127.0.0.1:36367'\n", nil},
	{"KV hosts", "[[engine]]\nname='p'\nurl='http://p'\nrole='both'\nkv_hosts='10.0.0.1,a b'\n", []want{{"engine[0].kv_hosts", 5, `found "a b"`}}},
	{"moriio", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-moriio'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-moriio'\nkv_address='d:6301'\ntp_size=-1\n",
		[]want{{"engine[0].kv_address", 2, "is required"}, {"engine[1].kv_address", 11, "want host:HOST"}, {"engine[1].tp_size", 12, "from 0"}}},
	{"push", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-nixl-push'\nside_channel='p'\npp_size=-1\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-nixl-push'\n",
		[]want{{"engine[0].engine_id", 2, "is required"}, {"engine[0].side_channel", 6, "want host:port"}, {"engine[0].pp_size", 7, "from 0"}}},
	{"push without its own", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-nixl-push'\nengine_id='p'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-nixl-push'\n",
		[]want{{"engine[0].side_channel", 2, "is required"}}},
	{"push and pull", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-nixl-push'\nengine_id='p'\nside_channel='p:5600'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-nixl'\n",
		[]want{{"engine[0].connector", 5, `cannot pair with d ("vllm-nixl")`}}},
	{"P2P tier", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-p2p-tier'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-p2p-tier'\nside_channel='d'\n",
		[]want{{"engine[0].side_channel", 2, "is required"}, {"engine[1].side_channel", 11, "want host:port"}}},
	{"bidirectional", "[[engine]]\nname='p'\nurl='http://p'\nrole='both'\nconnector='vllm-store'\nbidirectional=true\ndecoder_kv_blocks_ttl='-1s'\n",
		[]want{{"engine[0].bidirectional", 6, "is for connector"}, {"engine[0].decoder_kv_blocks_ttl", 7, "negative"}}},
	{"moriio with an address of one port", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-moriio'\nkv_address='p:6301'\n", []want{{"engine[0].kv_address", 6, "want host:HOST"}}},
	{"moriio of two modes", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-moriio'\nkv_address='host:p,handshake:1,notify:2'\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-moriio-read'\nkv_address='host:d,handshake:1,notify:2'\n",
		[]want{{"engine[0].connector", 5, "cannot pair"}}},
	{"fleet", "[fleet]\nworkers=-1\nlisten='x'\ncoordinator='unix:'\nnode_id=256\n",
		[]want{{"fleet.workers", 2, "from 0 to 64"}, {"fleet.listen", 3, "want host:port"},
			{"fleet.coordinator", 4, "no path"}, {"fleet.coordinator", 4, "must not be set together"}, {"fleet.node_id", 5, "from -1 to 255"}}},
	{"fleet without an id", "[fleet]\nworkers=2\nnode_id=-1\n", []want{{"fleet.node_id", 3, "must not be -1"}}},
	{"fleet of several coordinators", "[fleet]\nlisten='0.0.0.0:7000'\nname='a/b'\n[fleet.etcd]\nendpoints=['e:1',\n'http://e:2379']\nlease='1500ms'\nkey='k'\n",
		[]want{{"fleet.listen", 2, "needs fleet.token_file, fleet.tls or fleet.open"}, {"fleet.listen", 2, "other hosts cannot connect"}, {"fleet.name", 3, "invalid name"},
			{"fleet.etcd.endpoints[0]", 5, "invalid URL"}, {"fleet.etcd.lease", 7, "whole seconds"}, {"fleet.etcd.key", 8, "needs fleet.etcd.cert"}}},
	{"fleet of several coordinators without an address", "[fleet]\nadvertise='h:1'\netcd.endpoints=['http://e:2379']\n",
		[]want{{"fleet.advertise", 2, "needs fleet.listen"}, {"fleet.etcd.endpoints", 3, "needs fleet.listen"}}},
	{"workers of a leader that nobody names", "[fleet]\ncoordinator='leader'\nname=''\n",
		[]want{{"fleet.coordinator", 2, "needs fleet.etcd.endpoints"}, {"fleet.name", 3, "is required"}}},
	{"fleet between hosts without proof", "[fleet]\ncoordinator='10.0.0.5:8331'\nplain_http=true\n", []want{{"fleet.coordinator", 2, "needs fleet.token_file, fleet.tls or fleet.open"}}},
	{"leader of other hosts without proof", "[fleet]\ncoordinator='leader'\netcd.endpoints=['http://127.0.0.1:2379','https://e:2379']\n", []want{{"fleet.coordinator", 2, "could pose as the coordinator"}}},
	{"plain HTTP without a token", "[fleet]\nlisten='10.0.0.5:8331'\nplain_http=true\ntls.ca='a'\ntls.cert='c'\ntls.key='k'\n", []want{{"fleet.plain_http", 3, "plain HTTP shows no certificate"}}},
	{"certificates without a CA", "[fleet.tls]\ncert='c'\nkey='k'\n", []want{{"fleet.tls.cert", 2, "needs fleet.tls.ca"}}},
	{"a CA alone", "[fleet.tls]\nca='c'\n", []want{{"fleet.tls.ca", 2, "needs fleet.tls.cert"}}},
	{"passwords of etcd without encryption", "[discovery.etcd]\nendpoints=['http://localhost:1','http://e:2379']\nusername='u'\npassword_file='p'\n[fleet]\nlisten='127.0.0.1:7000'\n[fleet.etcd]\nendpoints=['http://e:2379']\nusername='u'\npassword_file='p'\n",
		[]want{{"discovery.etcd.password_file", 4, "needs https or discovery.etcd.plain_http"}, {"fleet.etcd.password_file", 10, "endpoints[0] is neither https nor loopback"}}},
	{"fleet without patience", "[fleet]\npatience='0s'\n", []want{{"fleet.patience", 2, "more than 0"}}},
	{"keys for any local worker", "[fleet]\nlisten='127.0.0.1:7000'\n[[engine]]\nname='a'\nurl='https://a'\nrole='both'\napi_key_file='k'\n",
		[]want{{"fleet.listen", 2, "every user of this host"}}},
	{"a remote's key for any local worker", "[fleet]\nlisten='127.0.0.1:7000'\n[[remote]]\nname='a'\nurl='https://a'\nmodel='m'\napi_key_file='k'\n",
		[]want{{"fleet.listen", 2, "every user of this host"}}},
	{"keys of found engines for any local worker", "[fleet]\nlisten='127.0.0.1:7000'\n[[discovery.dns.engine]]\nname='a'\nurl='https://a'\nrole='both'\napi_key_file='k'\n",
		[]want{{"fleet.listen", 2, "every user of this host"}}},
	{"fleet on the admin's address", "[fleet]\nlisten='localhost:9090'\n", []want{{"fleet.listen", 2, "used by admin.listen"}}},
	{"sidecar", "[sidecar]\nlocal='h'\nrole='x'\nconnector='x'\nheader='a b'\n",
		[]want{{"sidecar.local", 2, "scheme"}, {"sidecar.role", 3, "one of"}, {"sidecar.connector", 4, "one of"}, {"sidecar.header", 5, "name of a header"}}},
	{"labels of pods", "[discovery.kubernetes]\nlabels=['a=', 'b c', 'x=b c', 'zone=p/q', 'zone',\n'app.kubernetes.io/name', 'rack=a/b/c']\n",
		[]want{{"discovery.kubernetes.labels[0]", 2, "NAME or NAME=LABEL"}, {"discovery.kubernetes.labels[1]", 2, "must begin with the name"}, {"discovery.kubernetes.labels[2]", 2, "NAME or NAME=LABEL"},
			{"discovery.kubernetes.labels[4]", 2, "occurs twice"}, {"discovery.kubernetes.labels[6]", 3, "NAME or NAME=LABEL"}}},
	{"too many labels of pods", "[discovery.kubernetes]\nlabels=['zone', 'a', 'b', 'c', 'd', 'e']\n[[discovery.kubernetes.engine]]\nname='p'\nurl='http://s.n'\nrole='both'\nlabels={a='1', f='2'}\n",
		[]want{{"discovery.kubernetes.labels", 2, "found 6 with those of the engine \"p\""}}},
	{"objects of a pool", "[epp]\npool='A_b.llm'\nmodel_header='a b'\n[fleet]\n[fleet.lease]\nname='a.b.c'\nduration='1500ms'\n[fleet.etcd]\nendpoints=['http://e:2379']\n",
		[]want{{"epp.pool", 2, "want NAME or NAME.NAMESPACE"}, {"epp.model_header", 3, "name of a header"}, {"fleet.lease.name", 6, "want NAME or NAME.NAMESPACE"},
			{"fleet.lease.name", 6, "together with fleet.etcd"}, {"fleet.lease.name", 6, "needs fleet.listen"}, {"fleet.lease.duration", 7, "whole seconds"}}},
	{"names of metrics", "[metrics]\nnames=['llm_d','vllm']\n", []want{{"metrics.names[1]", 2, "inference_extension"}}},
	{"status without a pool", "[epp]\nstatus=true\n", []want{{"epp.status", 2, "needs epp.pool"}}},
	{"headers of limits", "[limits]\npriority_header='a b'\ndeadline_header='a:b'\nfairness_header=' '\n[[priority_class]]\nname='x'\n",
		[]want{{"limits.priority_header", 2, "name of a header"}, {"limits.deadline_header", 3, "name of a header"}, {"limits.fairness_header", 4, "name of a header"}}},
	{"sidecar's headers", "[sidecar]\npolicy_header='a:b'\nprofile_header='EPP-Profile'\nconnector='sglang'\n",
		[]want{{"sidecar.policy_header", 2, "name of a header"}, {"sidecar.profile_header", 3, "cannot check"}}},
	{"sidecar's callers", "[sidecar]\ncallers=['10.0.0.1',\n'10.0.0.1/8',\n'x']\n",
		[]want{{"sidecar.callers[1]", 3, "invalid network"}, {"sidecar.callers[2]", 4, "invalid network"}}},
	{"sidecar's picker", "[sidecar]\npicker='x:1'\npicker_timeout='0s'\n",
		[]want{{"sidecar.picker", 2, "want ext_proc://host:port"}, {"sidecar.picker_timeout", 3, "more than 0"}}},
	{"sidecar's ext_proc picker", "[sidecar]\npicker='ext_proc://epp/x'\nlocal='http://x'\npicker_ca='ca.pem'\n[epp]\nlisten=':9002'\n",
		[]want{{"sidecar.picker", 2, "want ext_proc://host:port"}, {"sidecar.picker", 2, "no decode leg on another engine"}, {"sidecar.picker", 2, "together with epp.listen"},
			{"sidecar.picker_ca", 4, "needs an ext_procs://"}, {"epp.listen", 6, "together with sidecar.local"}}},
	{"sidecar's picker that always fails open", "[sidecar]\npicker='ext_proc://epp:9002'\npicker_failure_mode_allow=true\nlocal='http://x'\nrole='prefill'\n",
		[]want{{"sidecar.picker_failure_mode_allow", 3, "together with sidecar.local"}}},
	{"sidecar's ext_procs picker", "[sidecar]\npicker='ext_procs://epp:9002'\npicker_ca='ca.pem'\npicker_insecure_skip_verify=true\n",
		[]want{{"sidecar.picker_ca", 3, "accepts any certificate"}}},
	{"sidecar's keys of an ext_proc picker", "[sidecar]\npicker='http://x'\npicker_failure_mode_allow=true\npicker_subset=true\npicker_ca='x'\npicker_insecure_skip_verify=true\n",
		[]want{{"sidecar.picker", 2, "the JSON form of a picker was removed: use an endpoint picker that serves ext_proc"}, {"sidecar.picker_failure_mode_allow", 3, "ext_proc://"}, {"sidecar.picker_subset", 4, "ext_proc://"}, {"sidecar.picker_ca", 5, "ext_procs://"}, {"sidecar.picker_insecure_skip_verify", 6, "ext_procs://"}}},
	{"sidecar's policies", "[sidecar]\npolicies=['local','x']\n", []want{{"sidecar.policies", 2, `found "x"`}}},
	{"sidecar's policies twice", "[sidecar]\npolicies=['local','local']\n", []want{{"sidecar.policies", 2, "twice"}}},
	{"sidecar's policies of the other role", "[sidecar]\npolicies=['decode_placed']\n", []want{{"sidecar.policies", 2, `role "decode"`}}},
	{"sidecar's policies without picker", "[sidecar]\nrole='prefill'\npolicies=['decode_picked']\n", []want{{"sidecar.policies", 3, "needs sidecar.picker"}}},
	{"sidecar's policies of one header", "[sidecar]\nrole='both'\npolicies=['prefill_named','decode_named']\n", []want{{"sidecar.policies", 3, "both read sidecar.header"}}},
	{"sidecar's policies without legs", "[sidecar]\nrole='both'\nconnector='none'\npolicies=['prefill_placed']\n", []want{{"sidecar.policies", 4, "no second leg"}}},
	{"sidecar's engine is another", twoEngines + "[sidecar]\nlocal='http://127.0.0.1:8100'\n", []want{{"engine[0].url", 3, "whose role"}}},
	{"sidecar's name is taken", twoEngines + "[[engine]]\nname='local'\nurl='http://x'\nrole='both'\n[sidecar]\nlocal='http://127.0.0.1:8000'\n",
		[]want{{"engine[2].name", 12, "is the name of"}}},
	{"sidecar's engine cannot pair", "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='sglang'\n[sidecar]\nlocal='http://x'\n",
		[]want{{"engine[0].connector", 5, `cannot pair with local ("vllm-nixl")`}}},
	{"sidecar of MoRI-IO", "[sidecar]\nlocal='http://x'\nconnector='vllm-moriio'\n", []want{{"sidecar.connector", 3, "kv_address"}}},
	{"sidecar in a fleet", "[fleet]\nworkers=2\n[sidecar]\nlocal='http://x'\n", []want{{"sidecar.local", 4, "one process"}}},
	{"sidecar without protocol", "[sidecar]\nconnector='none'\nheader=''\n", []want{{"sidecar.connector", 2, "needs role"}, {"sidecar.header", 3, "name of a header"}}},
}

func TestProblems(t *testing.T) {
	for _, tt := range problemCases {
		t.Run(tt.name, func(t *testing.T) { checkProblems(t, tt.text, tt.want) })
	}
}

// checkProblems parses text and compares the problems with want, one by one.
func checkProblems(t *testing.T, text string, want []want) {
	t.Helper()
	_, err := Parse([]byte(text))
	problems, ok := err.(Problems)
	if !ok {
		if err != nil || len(want) > 0 {
			t.Fatalf("got error %v, want Problems", err)
		}
		return
	}
	for i, p := range problems {
		if i >= len(want) {
			t.Errorf("unexpected: %v", p)
			continue
		}
		if w := want[i]; p.Key != w.key || p.Line != w.line || !strings.Contains(p.Message, w.fragment) {
			t.Errorf("problem %d: got %q, want key %q, line %d, %q", i, p, w.key, w.line, w.fragment)
		}
	}
	for _, w := range want[min(len(problems), len(want)):] {
		t.Errorf("missing: %+v", w)
	}
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a password is repeated: %v", err)
	}
}

// TestAccepted lists configurations that are just valid.
func TestAccepted(t *testing.T) {
	for name, text := range map[string]string{
		"ACME with client certificates and HTTP/3": "[server]\nlisten=':443'\nhttp3=':443'\ntls.client_ca='ca'\n[server.acme]\ndomains=['a.example.org']\nstorage='s'\n",
		"ACME of a private server":                 "[server]\nlisten=':443'\n[server.acme]\ndomains=['proxy']\nstorage='s'\ndirectory='https://ca.internal/acme/acme/directory'\n",
		"trial TLS and HTTP/3 on one port":         "[server]\nlisten=':443'\nhttp3=':443'\ntls.self_signed=true\n",
		"certificate and client CA":                "server.tls = {cert='c', key='k', client_ca='a'}\n",
		"admin with token":                         "admin = {listen='0.0.0.0:9090', token_file='t'}\n",
		"admin on IPv6 loopback":                   "admin.listen = '[::1]:9090'\n",
		"free ports":                               "server.listen='127.0.0.1:0'\nadmin.listen='127.0.0.1:0'\n",
		"one port on two addresses":                "server.listen='10.0.0.1:9090'\n",
		"all of IPv4 and one of IPv6":              "server.listen='0.0.0.0:9090'\nadmin.listen='[::1]:9090'\n",
		"nothing waits":                            "limits = {queue=0, queue_timeout=''}\n",
		"zeros that mean something":                "server={drain_timeout='0s', read_timeout='0s'}\nretry={budget=0, min_budget=0}\ntransport.max_idle=0\n",
		"storage for workers":                      "[discovery.trtllm]\ncluster_uri='http://127.0.0.1:1'\n",
		"storage with a token":                     "[discovery.trtllm]\ncluster_uri='http://10.0.0.1:1'\ntoken_file='t'\n",
		"storage for everybody":                    "[discovery.trtllm]\ncluster_uri='http://0.0.0.0:1'\nopen=true\n",
		"what the engine says":                     "trtllm.schedule_style = ''\n",
		"decode alone":                             "[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='sglang'\n",
		"prefill pairs with both":                  "engine = [{name='p', url='http://p', role='prefill', connector='sglang'}, {name='b', url='http://b', role='both', connector='sglang'}]\n",
		"connectors apart by model": "engine = [{name='p', url='http://p', role='prefill', connector='sglang', model='a'}, " +
			"{name='d', url='http://d', role='decode', connector='trtllm', model='b'}]\n",
		"two connectors, each with both roles": twoEngines +
			"[[engine]]\nname='p1'\nurl='http://p1'\nrole='prefill'\nconnector='trtllm'\nwire='g3'\n[[engine]]\nname='d1'\nurl='http://d1'\nrole='decode'\nconnector='trtllm'\n",
		"tables without keys": "[discovery.dns]\n[discovery.kubernetes]\n",
		"discovery": "[discovery]\nallow=['10.0.0.0/8','.svc','h-1.lab','::1']\ntrtllm.cluster_uri='etcd://a:1, etcd://b:1'\nfile.path='e.json'\n" +
			"etcd.endpoints=['https://e:2379']\n[[discovery.dns.engine]]\nname='p'\nurl='http://_http._tcp.p.svc/v'\nrole='both'\nkv_events='tcp://*:5557'\n",
		"byte order mark": "\xef\xbb\xbfserver.listen = ':1'\n",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse([]byte(text)); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	for _, tt := range []struct {
		name string
		text string
		want []want
	}{
		{"a whole pair", twoEngines, nil},
		{"engines are found", "discovery.file.path = 'e.toml'\n", nil},
		{"no engine", "", []want{{"engine", 0, "no engine"}}},
		{"decode and no prefill", "\n[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='sglang'\n",
			[]want{{"engine[0].role", 5, `no prefill engine to pair with d ("sglang")`}}},
		{"prefill and no decode, five times", strings.Repeat("[[engine]]\nname='pN'\nurl='http://pN'\nrole='prefill'\nconnector='sglang'\n", 5),
			[]want{{"engine[0].role", 4, `no decode engine to pair with p1 ("sglang"), p2 ("sglang"), p3 ("sglang"), 2 more`}}},
		{"no partner for the model", twoEngines + "model = 'b'\n[[engine]]\nname='d1'\nurl='http://d1'\nrole='decode'\nconnector='vllm-nixl'\nmodel='a'\n", nil},
		{"one address twice", strings.Replace(twoEngines, "8200", "8100", 1), []want{{"engine[1].url", 8, `also the address of "p0"`}}},
		{"the path /v1", strings.Replace(twoEngines, ":8200", ":8200/v1/", 1), []want{{"engine[1].url", 8, "ends with /v1: the proxy adds the whole route"}}},
		{"keys without effect", twoEngines + "bootstrap_host='h'\nbootstrap_port=1\nwire='g1'\nca='c'\n",
			[]want{{"engine[1].bootstrap_host", 11, "no effect"}, {"engine[1].bootstrap_port", 12, "no effect"}, {"engine[1].wire", 13, "no effect"}, {"engine[1].ca", 14, "not https"}}},
		{"sglang without disaggregation is no partner", "[[engine]]\nname='a'\nurl='http://a'\nrole='prefill'\nconnector='sglang'\n[[engine]]\nname='b'\nurl='http://b'\nrole='both'\nconnector='sglang'\n",
			[]want{{"engine[0].role", 4, "no decode engine"}}},
		{"ACME without a way to port 443", twoEngines + "[server]\nlisten=':8443'\n[server.acme]\ndomains=['a.example.org']\nstorage='s'\n",
			[]want{{"server.acme.domains", 14, "port 443 of the names must lead to :8443"}}},
		{"ACME at port 443", twoEngines + "[server]\nlisten=':443'\n[server.acme]\ndomains=['a.example.org']\nstorage='s'\n", nil},
		{"ACME with HTTP-01", twoEngines + "[server]\nlisten=':8443'\n[server.acme]\ndomains=['a.example.org']\nstorage='s'\nhttp_port=80\n", nil},
		{"the server of Go's library", twoEngines + "[server]\nhttp1='nethttp'\n", []want{{"server.http1", 12, "is deprecated: 0.2.0 removes"}}},
		{"sets of scorers without use", twoEngines + "[[scores]]\nname='a'\n", []want{{"scores[0].name", 12, `policy.place is not "scores"`}}},
		{"a set for all requests before others", twoEngines + "[policy]\nplace='scores'\n[[scores]]\nname='a'\nmodels=['m']\n[[scores]]\nname='b'\n[[scores]]\nname='c'\n",
			[]want{{"scores[2].name", 19, `the set "b" before it is for all requests`}}},
		{"ranks of trtllm", "[[engine]]\nname='a'\nurl='http://a'\nrole='both'\nconnector='trtllm'\nranks=4\n",
			[]want{{"engine[0].ranks", 6, "choose their ranks themselves"}}},
		{"added engines", "[admin]\ntrust_added_engines = true\n[[engine]]\nname='a'\nurl='https://a'\nrole='both'\n",
			[]want{{"admin.trust_added_engines", 2, "files of this machine"}}},
		{"any local user registers", "[discovery.trtllm]\ncluster_uri='http://127.0.0.1:7001'\n[discovery.moriio]\nlisten='tcp://127.0.0.1:7002'\n",
			[]want{{"discovery.trtllm.cluster_uri", 2, "register an engine"}, {"discovery.moriio.listen", 4, "register an engine"}}},
		{"no verification", "[[engine]]\nname='a'\nurl='https://a'\nrole='both'\ninsecure_skip_verify=true\nca='c'\n",
			[]want{{"engine[0].insecure_skip_verify", 5, "any certificate"}, {"engine[0].ca", 6, "insecure_skip_verify"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := tt.text
			for _, n := range []string{"1", "2", "3", "4", "5"} {
				text = strings.Replace(text, "pN", "p"+n, 2)
			}
			cfg, err := Parse([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			got := cfg.Warnings()
			if len(got) != len(tt.want) {
				t.Fatalf("got %v, want %v", got, tt.want)
			}
			for i, w := range tt.want {
				if p := got[i]; p.Key != w.key || p.Line != w.line || !strings.Contains(p.Message, w.fragment) {
					t.Errorf("got %q, want %+v", p, w)
				}
			}
		})
	}
}
