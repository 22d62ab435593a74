package config

import "strings"

// RemotePrefix begins the names by which fallback refers to a [[remote]].
const RemotePrefix = "remote:"

// ConnectorRemote is the connector of a [[remote]]. No [[engine]] may have it.
const ConnectorRemote = "remote"

// Remote is an OpenAI endpoint of another operator, for requests that no engine can take.
type Remote struct {
	// Name is the name of the endpoint in fallback (after "remote:"), logs and metrics:
	// letters, digits and - _ . : @, unique. Required.
	Name string `toml:"name"`
	// URL is its https address without /v1; a path is put before every route. http is
	// for this host only. Required.
	URL string `toml:"url"`
	// APIKeyFile is a file with the key that is sent to the endpoint. The client's key is
	// never sent. Default "": none.
	APIKeyFile string `toml:"api_key_file"`
	// Model is the endpoint's name of the model. Required.
	Model string `toml:"model"`
	// CA is a PEM file with the certificate authorities of its certificate. Default "":
	// those of the system.
	CA string `toml:"ca"`
}

// engine returns the remote as an instance whose model only fallback can name.
func (r Remote) engine() Engine {
	e := DefaultEngine()
	e.Name, e.Model = RemotePrefix+r.Name, RemotePrefix+r.Name
	e.URL, e.Role, e.Connector = r.URL, RoleBoth, ConnectorRemote
	e.APIKeyFile, e.CA, e.RemoteModel = r.APIKeyFile, r.CA, r.Model
	return e
}

// Instances returns AllEngines and the remotes as instances.
func (c *Config) Instances() []Engine {
	list := c.AllEngines()
	list = list[:len(list):len(list)]
	for _, r := range c.Remotes {
		list = append(list, r.engine())
	}
	return list
}

// remotes checks every [[remote]].
func (k *checker) remotes() {
	names := map[string]string{}
	for i, r := range k.config.Remotes {
		key := func(name string) string { return joinKey(indexKey("remote", i), name) }
		k.name(key("name"), r.Name)
		k.unique(key("name"), r.Name, names)
		switch {
		case exposed(r.URL):
			k.add(key("url"), "must be https: prompts and the key would cross the network without encryption")
		case endsWithV1(r.URL):
			k.add(key("url"), "must not end with /v1: the proxy adds the whole route, such as /v1/chat/completions")
		default:
			k.httpURL(key("url"), r.URL)
		}
		k.modelName(key("model"), r.Model)
	}
	for i, e := range k.config.Engines {
		if strings.HasPrefix(e.Name, RemotePrefix) {
			k.add(engineKey(i, "name"), "must not begin with %q, which begins the names of [[remote]]", RemotePrefix)
		}
	}
}

// endsWithV1 reports whether a URL ends with a part of the routes that the proxy adds.
func endsWithV1(url string) bool { return strings.HasSuffix(strings.TrimRight(url, "/"), "/v1") }

// remote requires the name of a [[remote]] in a fallback.
func (k *checker) remote(key, name string) {
	for _, r := range k.config.Remotes {
		if RemotePrefix+r.Name == name {
			return
		}
	}
	k.add(key, "no [[remote]] is named %q", strings.TrimPrefix(name, RemotePrefix))
}
