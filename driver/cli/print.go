package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

func (a *app) checkOutput() error {
	switch a.output {
	case "table", "wide", "json", "yaml", "name":
		return nil
	}
	return usagef("-o %s is not known: use table, wide, json, yaml or name", a.output)
}

// printObject writes an object: as json, yaml or name if -o asks for these forms, else by human.
func (a *app) printObject(w io.Writer, obj client.Object, human func(io.Writer)) error {
	switch a.output {
	case "table", "wide":
		human(w)
		return nil
	case "name":
		_, err := fmt.Fprintln(w, typedName(obj))
		return err
	}
	if err := prepareObject(obj); err != nil {
		return err
	}
	return a.encodeValue(w, obj)
}

// printList is printObject for a list. printList calls row for each object in order. The columns after "|" are for -o
// wide.
func (a *app) printList(w io.Writer, list client.ObjectList, header string, row func(runtime.Object) []string) error {
	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	switch a.output {
	case "name":
		for _, o := range items {
			if _, err := fmt.Fprintln(w, typedName(o.(client.Object))); err != nil {
				return err
			}
		}
		return nil
	case "table", "wide":
		header = text.Columns(header, a.output == "wide")
		rows := make([][]string, 0, len(items))
		for _, o := range items {
			rows = append(rows, row(o)[:len(strings.Fields(header))])
		}
		return text.Table(w, header, rows)
	}
	for _, o := range items {
		if err := prepareObject(o.(client.Object)); err != nil {
			return err
		}
	}
	if err := meta.SetList(list, items); err != nil {
		return err
	}
	gvk, err := apiutil.GVKForObject(list, scheme)
	if err != nil {
		return err
	}
	list.GetObjectKind().SetGroupVersionKind(gvk)
	return a.encodeValue(w, list)
}

// encodeValue writes v as json or yaml. For several names a command calls encodeValue once per document.
func (a *app) encodeValue(w io.Writer, v any) error {
	if a.output == "yaml" {
		out, err := yaml.Marshal(v)
		if err != nil {
			return err
		}
		if a.encoded {
			out = append([]byte("---\n"), out...)
		}
		a.encoded = true
		_, err = w.Write(out)
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// prepareObject sets an object's kind, which typed clients omit, and removes the managed fields.
func prepareObject(obj client.Object) error {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return err
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	obj.SetManagedFields(nil)
	return nil
}

func typedName(obj client.Object) string {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return obj.GetName()
	}
	return strings.ToLower(gvk.Kind) + "." + gvk.Group + "/" + obj.GetName()
}

// outcome is the result for an object that is deleted or not shown.
type outcome struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Node   string `json:"node,omitempty"` // of a disk
	Result string `json:"result"`
}

// printOutcome reports a finished command in the form of -o; the kind is a key of kinds.
func (a *app) printOutcome(cmd *cobra.Command, kind, name, what string) {
	w := cmd.OutOrStdout()
	switch a.output {
	case "name":
		fmt.Fprintf(w, "%s.%s/%s\n", strings.ReplaceAll(kind, " ", ""), api.GroupVersion.Group, name)
	case "table", "wide":
		fmt.Fprintf(w, "%s %q %s\n", strings.TrimPrefix(strings.TrimPrefix(kind, "backing"), "backup "), name, what)
	default:
		_ = a.encodeValue(w, outcome{Kind: kinds[kind], Name: name, Result: what}) // a struct of strings always encodes
	}
}

// printDiskOutcome reports a finished command on a disk, named as other commands accept the name.
func (a *app) printDiskOutcome(cmd *cobra.Command, node, path, what string) {
	w := cmd.OutOrStdout()
	switch a.output {
	case "name":
		fmt.Fprintf(w, "%s:%s\n", node, path)
	case "table", "wide":
		fmt.Fprintf(w, "disk %q %s\n", path, what)
	default:
		_ = a.encodeValue(w, outcome{Kind: "Disk", Name: path, Node: node, Result: what})
	}
}

// kinds maps the kinds in people's words to API kinds.
var kinds = map[string]string{"volume": "Volume", "backingimage": "BackingImage", "snapshot": "Snapshot",
	"snapshot group": "SnapshotGroup", "node": "Node", "backup target": "BackupTarget", "backup": "Backup"}
