package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/preflight"
	"drover.io/drover/driver/cli/text"
)

func (a *app) preflightCommand() *cobra.Command {
	var disks []string
	c := &cobra.Command{
		Use:   "preflight",
		Short: "Check whether this machine can run Drover, and name the remedies",
		Long: "Looks at the kernel, FUSE, loop devices, io_uring, tools, limits and disks " +
			"of this machine; changes nothing.\n" +
			"Exit code 0: nothing is missing; 1: something is missing. Warnings do not count.",
		Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.checkOutput(); err != nil {
				return err
			}
			all := preflight.Run(disks)
			bad := 0
			for _, f := range all {
				if f.Result == preflight.Failed {
					bad++
				}
			}
			if err := a.printFindings(cmd, all); err != nil {
				return err
			}
			if bad > 0 {
				return api.Errorf(api.Other, "preflight: %d of %d checks failed", bad, len(all))
			}
			return nil
		},
	}
	c.Flags().StringSliceVar(&disks, "disk", []string{DefaultStateDir}, "folder that shall become a disk")
	return c
}

func (a *app) printFindings(cmd *cobra.Command, all []preflight.Finding) error {
	w := cmd.OutOrStdout()
	switch a.output {
	case "json", "yaml":
		return a.encodeValue(w, all)
	case "name":
		for _, f := range all {
			if f.Result == preflight.Failed {
				fmt.Fprintln(w, f.Check)
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(all))
	for _, f := range all {
		rows = append(rows, []string{f.Check, f.Result, f.Detail})
	}
	if err := text.Table(w, "CHECK RESULT DETAIL", rows); err != nil {
		return err
	}
	for _, f := range all {
		if f.Advice != "" {
			fmt.Fprintf(w, "\n%s: %s\n", f.Check, f.Advice)
		}
	}
	return nil
}
