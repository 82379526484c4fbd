// Command drover is block storage for Kubernetes and for single machines: `drover serve` runs it, the other commands
// use it.
package main

import (
	"os"

	"drover.io/drover/driver"
)

func main() { os.Exit(driver.Main(os.Args[1:])) }
