"""`graticule info`: which recipes there are, and what each is."""

import argparse
import textwrap

from graticule.cli.output import by, print_result


def run_info(options: argparse.Namespace) -> int:
    if options.recipe is None:
        _print_recipes(options)
        return 0
    from graticule.assemble import describe, shapes_of_config
    from graticule.config import override
    from graticule.recipes import recipe

    config = override(recipe(options.recipe), options.set)
    info = describe(config, shapes_of_config(config))
    channels = f"{info['in_channels']} channels in, {info['out_channels']} out"
    if info["family"] == "swin":
        shape = [
            f"grid {by(info['grid'])}, padded {by(info['padded_shape'])}, {info['tokens']:,} tokens"
            f" in {info['windows']:,} windows, {channels}"
        ]
    elif info["family"] == "beast":
        shape = [f"grid {by(info['grid'])}, {channels}, {config.model.words}"]
        for stage in info["stages"]:
            shape.append(
                f"  {stage['name']:8} {by(stage['grid']):>12} tokens of {stage['features']:5}"
                f" features, {stage['blocks']} blocks, {stage['windows']} windows of"
                f" {by(stage['window'])}   {stage['parameters']:>13,}"
            )
        of = info["parameters_of"]
        shape.append(
            f"  of the parameters {of['means']:,} are means, {of['deviations']:,} deviations,"
            f" {of['others']:,} plain numbers"
        )
    else:
        shape = [f"grid {by(info['grid'])}, {channels}, {config.model.words}"]
        for stage in info["stages"]:
            features = " -> ".join(map(str, stage["features"]))
            shape.append(
                f"  {stage['name']:8} {by(stage['grid']):>12}   {features:>18}   dilation"
                f" {stage['dilation']:2}   {stage['parameters']:>12,}"
            )
        shape += [info["seam"]] if info["seam"] else []
    parts = "convolutions"
    if info["family"] != "unet":
        parts = (
            f"linears and convolutions {_flop(info['forward_flops_dense'])}, attention"
            f" {_flop(info['forward_flops_attention'])}"
        )
    if info["family"] == "beast":
        parts += (
            f"; of the linears embedding and recovery {_flop(info['forward_flops_embedding'])};"
            f" not counted: the norms' noise {_flop(info['forward_flops_noise'])}"
        )
    text = [
        f"{info['recipe']}: {info['parameters']:,} parameters",
        *shape,
        f"forward {_flop(info['forward_flops'])} (2 per multiply-add): {parts}",
        f"training step, {info['leads']} lead{'s' * (info['leads'] > 1)}:"
        f" {_flop(info['step_flops'])} a sample (3 times the forward"
        f"{'' if info['family'] == 'unet' else ', of attention 3.5 times'})",
    ]
    print_result(options, info, lambda: "\n".join(text))
    return 0


def _print_recipes(options: argparse.Namespace) -> None:
    from graticule.recipes import descriptions

    found = descriptions()
    width = max(map(len, found))
    text = "\n".join(
        textwrap.fill(
            f"{name:{width}}  {what}", 100, subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
        )
        for name, what in found.items()
    )  # fmt: skip
    print_result(options, found, lambda: text)


def _flop(number: float) -> str:
    return f"{number / 1e12:,.2f} TFLOP" if number >= 1e11 else f"{number / 1e9:,.3f} GFLOP"
