package exchange

import (
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/abi"
)

// declared returns the headers of a request that policies declare, by their names in lower
// case. Headers that the request does not have are not in the list. The list does not share
// memory with h, except that of the values.
func declared(h http.Header, names []string) []abi.RequestHeader {
	var list []abi.RequestHeader
	for _, name := range names {
		values := h.Values(name)
		if len(values) == 0 {
			continue
		}
		if list == nil {
			list = make([]abi.RequestHeader, 0, len(names))
		}
		value, cut := values[0], false
		if len(values) > 1 {
			value = strings.Join(values, ", ")
		}
		if len(value) > abi.MaxHeaderValue {
			end := abi.MaxHeaderValue
			for back := 1; back < utf8.UTFMax && !utf8.RuneStart(value[end]); back++ {
				end-- // a character is not cut
			}
			value, cut = value[:end], true
		}
		list = append(list, abi.RequestHeader{Name: name, Value: strings.ToValidUTF8(value, "?"), Present: true, Cut: cut})
	}
	return list
}
