package shared

import (
	"errors"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
)

// kept is a Conversations for values of up to 3 bytes.
type kept map[string]string

func (k kept) Value(dst []byte, key string) ([]byte, bool) {
	v, ok := k[key]
	return append(dst, v...), ok
}

func (k kept) SetValue(key string, value []byte) error {
	if len(value) > 3 {
		return errors.New("too long")
	}
	k[key] = string(value)
	return nil
}

func TestConversationValues(t *testing.T) {
	k := kept{}
	for _, tt := range []struct {
		name, args string
		want       host.Status
	}{
		{"a value", "\x02\x00\x00\x00abxyz", host.OK},
		{"an empty value", "\x01\x00\x00\x00c", host.OK},
		{"no key", "\x00\x00\x00\x00v", host.OK},
		{"nothing", "", host.BadArgument},
		{"half a size", "\x01\x00\x00", host.BadArgument},
		{"a key that is not there", "\x02\x00\x00\x00a", host.BadArgument},
		{"a key of 4 GiB", "\xff\xff\xff\xffab", host.BadArgument},
		{"a key that is too long", "\x01\x00\x01\x00" + strings.Repeat("k", host.MaxName+1), host.BadArgument},
		{"too long", "\x01\x00\x00\x00dwxyz", host.BadArgument},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, got := ConversationPut(k, []byte(tt.args)); got != tt.want {
				t.Errorf("put: %v, want %v", got, tt.want)
			}
		})
	}
	for key, want := range map[string]string{"ab": "xyz", "c": "", "": "v"} {
		if got, status := ConversationGet(k, []byte(key)); status != host.OK || string(got) != want {
			t.Errorf("get %q: %q, %v", key, got, status)
		}
	}
	if _, status := ConversationGet(k, []byte("d")); status != host.NotFound {
		t.Errorf("a key without a value: %v", status)
	}
	_, get := ConversationGet(nil, nil)
	_, put := ConversationPut(nil, []byte("\x00\x00\x00\x00"))
	if get != host.NotFound || put != host.NotFound {
		t.Errorf("without conversations: %v, %v", get, put)
	}
}
