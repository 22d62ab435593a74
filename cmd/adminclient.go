package cmd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// adminTokenVariable names the token's file where --token-file does not.
const adminTokenVariable = "PDPROXY_ADMIN_TOKEN_FILE"

// adminFlags say where an admin address is and which token it asks for.
type adminFlags struct{ address, tokenFile string }

func (f *adminFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.address, "admin", "127.0.0.1:9090", "admin address of the proxy")
	c.Flags().StringVar(&f.tokenFile, "token-file", "", "file with the admin token (default $"+adminTokenVariable+", else the token file of a proxy of this user on this machine)")
}

// adminTarget is an admin address and what is sent there.
type adminTarget struct {
	base  *url.URL
	token string // "": none
	// missing is why there is no token; nil if there is one, or if the proxy has made none.
	missing error
}

// target finds the token: in the file that was named, or else, of an address on
// loopback, in the file that the proxy has made. That token is sent to the very address
// that it is for: another one of the same name may belong to another user.
func (f *adminFlags) target() (*adminTarget, error) {
	address := f.address
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	base, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("--admin: %q is not an address", f.address)
	}
	t := &adminTarget{base: base}
	if file := cmp.Or(f.tokenFile, os.Getenv(adminTokenVariable)); file != "" {
		if t.token, err = config.ReadSecret(file); err != nil {
			return nil, fmt.Errorf("the admin token: %w", err)
		}
		return t, nil
	}
	for _, address := range loopbackAddresses(base) {
		token, err := admintoken.Find(address)
		switch {
		case err == nil:
			t.token, t.missing, base.Host = token, nil, address
			return t, nil
		case !errors.Is(err, fs.ErrNotExist):
			t.missing = err
		}
	}
	return t, nil
}

// loopbackAddresses are the addresses on loopback that a URL may stand for.
func loopbackAddresses(u *url.URL) []string {
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	host := u.Hostname()
	if host == "" || strings.EqualFold(host, "localhost") {
		return []string{net.JoinHostPort("127.0.0.1", port), net.JoinHostPort("::1", port)}
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsLoopback() {
		return []string{net.JoinHostPort(ip.String(), port)}
	}
	return nil
}

// get asks for what is at an escaped path. It follows no redirections, so that the token
// goes nowhere else.
func (t *adminTarget) get(path string) (*http.Response, error) {
	req, err := http.NewRequest(http.MethodGet, t.base.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	if t.token != "" {
		req.Header.Set("Authorization", "Bearer "+t.token)
	}
	client := http.Client{
		Timeout:       10 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err == nil && resp.StatusCode == http.StatusUnauthorized {
		resp.Body.Close()
		return nil, errors.Join(fmt.Errorf("%s asks for another token than was found; name its file by --token-file or $%s", t.base.Host, adminTokenVariable), t.missing)
	}
	return resp, err
}

func (a *app) adminTokenCommand() *cobra.Command {
	var admin adminFlags
	c := &cobra.Command{
		Use:   "admin-token",
		Short: "Print the token of an admin address, for curl",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			t, err := admin.target()
			switch {
			case err != nil:
				return err
			case t.token == "":
				return exit.Failed(cmp.Or(t.missing, fmt.Errorf("no proxy of this user serves %s with a token that it has made", t.base.Host)))
			case a.json:
				return exit.Failed(a.printJSON(map[string]string{"token": t.token}))
			}
			_, err = fmt.Fprintln(a.out, t.token)
			return exit.Failed(err)
		},
	}
	admin.add(c)
	return c
}
