// Command man writes the man pages of the drover commands to a folder: `make man`.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"

	"drover.io/drover/driver"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIR")
		os.Exit(2)
	}
	root := driver.Command()
	root.DisableAutoGenTag = true
	err := os.MkdirAll(os.Args[1], 0o755)
	if err == nil {
		err = doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "Drover", Manual: "Drover"}, os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
