package text

import (
	"strings"
	"testing"
)

func TestTableIsAlignedAndHasNoControlCharacters(t *testing.T) {
	var out strings.Builder
	if err := Table(&out, "NAME STATE", [][]string{{"a-long-name", ""}, {"b", "re\x1b[31mady"}}); err != nil {
		t.Fatal(err)
	}
	if want := "NAME          STATE\na-long-name   -\nb             re?[31mady\n"; out.String() != want {
		t.Errorf("the table is\n%swant\n%s", out.String(), want)
	}
	out.Reset()
	if err := Table(&out, "NAME STATE", nil); err != nil || out.String() != "NAME   STATE\n" {
		t.Errorf("an empty table is %q, %v", out.String(), err)
	}
}
