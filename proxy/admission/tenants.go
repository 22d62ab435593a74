package admission

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Tenants returns the tenants of the configuration by name.
func Tenants(list []config.Tenant) map[string]*tenant.Tenant {
	byName := make(map[string]*tenant.Tenant, len(list))
	for _, t := range list {
		one := tenant.Tenant{Name: t.Name, Class: t.Class, Weight: t.Weight, Limits: tenant.Limits{
			Requests: int64(t.RequestsPerMinute), Tokens: int64(t.TokensPerMinute), Exchanges: t.MaxExchanges,
		}}
		if len(t.Models) > 0 {
			one.Models = t.Models
		}
		byName[t.Name] = tenant.New(one)
	}
	return byName
}

// keyLine is the attributes of one line of a file of keys.
type keyLine struct {
	number int
	tenant string // "": the key has a tenant of its own
	attributes
}

// attributes are those that describe a tenant.
type attributes struct {
	class  string
	models []string
	limits tenant.Limits
	names  []string // of the attributes that are set
}

// maxClass is the longest name of a class or a tenant, and maxModel that of a model, in bytes.
const (
	maxClass = 256
	maxModel = 256
)

// set reads one attribute, "NAME=VALUE". The error names the attribute.
func (l *keyLine) set(word string) error {
	name, value, _ := strings.Cut(word, "=")
	var err error
	switch name {
	case "tenant":
		l.tenant, err = value, nameError(value)
	case "class":
		l.class, err = value, nameError(value)
	case "models":
		l.models = strings.Split(value, ",")
		if strings.ContainsAny(value, " \t\r\n") || slices.ContainsFunc(l.models, func(m string) bool { return m == "" || len(m) > maxModel }) {
			err = errors.New("want names of models with commas between them")
		}
	case "rpm":
		l.limits.Requests, err = count(value, tenant.MaxPerMinute)
	case "tpm":
		l.limits.Tokens, err = count(value, tenant.MaxPerMinute)
	case "max":
		var n int64
		n, err = count(value, math.MaxInt32)
		l.limits.Exchanges = int(n)
	default:
		return errors.New("the words after the SHA-256 must be tenant=, class=, models=, rpm=, tpm= or max= with a value")
	}
	if err == nil && slices.Contains(l.names, name) {
		err = errors.New("the line has the attribute twice")
	}
	if err != nil {
		return fmt.Errorf("attribute %s: %w", name, err)
	}
	l.names = append(l.names, name)
	return nil
}

func nameError(value string) error {
	if len(value) > maxClass || !validName(value) {
		return errors.New("want letters, digits and - _ . : @")
	}
	return nil
}

// count reads a number from 1 to limit.
func count(text string, limit int64) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || n > limit || text[0] == '+' {
		return 0, fmt.Errorf("want a whole number from 1 to %d", limit)
	}
	return n, nil
}

// tenants collects the tenants of a file of keys.
type tenants struct {
	configured map[string]*tenant.Tenant
	described  map[string]int // number of the line that describes the tenant
	made       map[string]*tenant.Tenant
	lines      []keyLine // of the keys, in the order of the file
}

func newTenants(list []config.Tenant) *tenants {
	return &tenants{configured: Tenants(list), described: make(map[string]int), made: make(map[string]*tenant.Tenant)}
}

// add reads the attributes of the line of a key.
func (all *tenants) add(number int, key string, words []string) error {
	l := keyLine{number: number}
	for _, word := range words {
		if err := l.set(word); err != nil {
			return err
		}
	}
	own := slices.DeleteFunc(slices.Clone(l.names), func(name string) bool { return name == "tenant" })
	grouped := l.tenant != ""
	if !grouped {
		l.tenant = key
	}
	switch {
	case len(own) == 0:
	case all.configured[l.tenant] != nil:
		return fmt.Errorf("attribute %s: the tenant is a [[tenant]] of the configuration, which has its limits", own[0])
	case all.described[l.tenant] > 0:
		return fmt.Errorf("attribute %s: line %d has the limits of the same tenant", own[0], all.described[l.tenant])
	default:
		all.described[l.tenant] = number
		all.made[l.tenant] = tenant.New(tenant.Tenant{Name: l.tenant, Class: l.class, Models: l.models, Limits: l.limits})
	}
	if !grouped && all.configured[key] == nil && all.made[key] == nil {
		l.tenant = "" // no line has to describe it
	}
	all.lines = append(all.lines, l)
	return nil
}

// assign gives each client, one for each line, its tenant.
func (all *tenants) assign(clients []*client) error {
	if n := len(all.configured) + len(all.made); n > tenant.MaxTenants {
		return fmt.Errorf("the keys and the [[tenant]] tables have %d tenants, more than %d", n, tenant.MaxTenants)
	}
	for i, c := range clients {
		l := &all.lines[i]
		name := l.tenant
		if name == "" {
			name = c.name
		}
		switch {
		case all.configured[name] != nil:
			c.tenant = all.configured[name]
		case all.made[name] != nil:
			c.tenant = all.made[name]
		case l.tenant == "":
			c.tenant = tenant.New(tenant.Tenant{Name: c.name})
		default:
			return fmt.Errorf("line %d: attribute tenant: no [[tenant]] of the configuration has the name, and no line has its limits", l.number)
		}
	}
	return nil
}
