// Package text writes tables, fields and values for people. Tables and fields hold none of the control characters that
// a status, an error or a store may hold. The package has no state.
package text

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/printers"

	"drover.io/drover/api"
)

// Columns is the header of a table, without the columns after "|" unless the table is wide.
func Columns(header string, wide bool) string {
	columns, more, _ := strings.Cut(header, " | ")
	if wide {
		columns += " " + more
	}
	return columns
}

// Table writes aligned columns as kubectl does. An empty cell shows as "-", so that scripts can count columns.
func Table(w io.Writer, header string, rows [][]string) error {
	names := strings.Fields(header)
	if len(rows) == 0 { // the printer would omit the header
		_, err := fmt.Fprintln(w, strings.Join(names, "   "))
		return err
	}
	t := &metav1.Table{}
	for _, name := range names {
		t.ColumnDefinitions = append(t.ColumnDefinitions, metav1.TableColumnDefinition{Name: name, Type: "string"})
	}
	for _, r := range rows {
		cells := make([]any, len(r))
		for i, text := range r {
			cells[i] = cmp.Or(api.PlainText(text), "-")
		}
		t.Rows = append(t.Rows, metav1.TableRow{Cells: cells})
	}
	return printers.NewTablePrinter(printers.PrintOptions{}).PrintObj(t, w)
}

// Line replaces control characters and ends of lines.
func Line(text string) string { return strings.ReplaceAll(api.PlainText(text), "\n", " ") }

// Fields writes "Name:  value" lines, except empty values.
func Fields(w io.Writer, pairs ...string) {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		if text := Line(pairs[i+1]); text != "" {
			fmt.Fprintf(tw, "%s:\t%s\n", pairs[i], text)
		}
	}
	_ = tw.Flush()
}
