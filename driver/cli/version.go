package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Version is set by the linker; a plain `go build` leaves Version empty, and the build information counts.
var Version string

// BuildVersion is the version of this program.
func BuildVersion() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return s.Value[:12]
			}
		}
	}
	return "unknown"
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this binary", Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.checkOutput(); err != nil {
				return err
			}
			v := map[string]string{"version": BuildVersion(), "go": runtime.Version(),
				"platform": runtime.GOOS + "/" + runtime.GOARCH}
			switch a.output {
			case "json", "yaml":
				return a.encodeValue(cmd.OutOrStdout(), v)
			case "name":
				fmt.Fprintln(cmd.OutOrStdout(), v["version"])
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "drover %s (%s, %s)\n", v["version"], v["go"], v["platform"])
			}
			return nil
		},
	}
}
