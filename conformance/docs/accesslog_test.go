package docs

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/accesslog"
)

// TestEveryFieldOfTheAccessLogIsListed: the page lists each field of a line, in the order of the line,
// with its type and, for a number, its unit.
func TestEveryFieldOfTheAccessLogIsListed(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/reference/access-log.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([^|]+) \\|([^|]*)\\|([^|]*)\\|$").FindAllStringSubmatch(string(text), -1)
	fields := reflect.TypeFor[accesslog.Entry]()
	if len(rows) != fields.NumField() {
		t.Fatalf("the page has %d fields, a line has %d", len(rows), fields.NumField())
	}
	for i, row := range rows {
		f := fields.Field(i)
		name, option, _ := strings.Cut(f.Tag.Get("json"), ",")
		want := typeInJSON(f.Type)
		if option == "omitempty" {
			want += ", optional"
		}
		if row[1] != name || row[2] != want {
			t.Errorf("field %d of the page is %s, %s; want %s, %s", i, row[1], row[2], name, want)
		}
		if unit := strings.TrimSpace(row[3]); (unit != "") != strings.HasPrefix(want, "number") {
			t.Errorf("%s has the unit %q", name, unit)
		}
	}
}

// typeInJSON names the type of a field as the page does.
func typeInJSON(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[time.Time](), t.Kind() == reflect.String:
		return "text"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Pointer:
		return typeInJSON(t.Elem()) + " or null"
	case t.Kind() == reflect.Slice:
		return "list of " + typeInJSON(t.Elem()) + "s"
	}
	return "number"
}
